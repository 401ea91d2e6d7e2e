"""Chapter 12: reading, mapping and loading weights, and what is said about files that are not what they seem."""

import dataclasses
import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from llm_engine.config import load_config, read_llama
from llm_engine.transformer import Transformer, load_model
from llm_engine.weights import (
    DTYPES,
    LOADERS,
    NAME_RULES,
    NameRules,
    Rule,
    WeightsError,
    available_memory,
    load_weights,
    memory_line,
    open_checkpoint,
    parse_header,
    read_header,
    weight_map,
    weight_table,
)

TINY = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def random_weights(page=TINY, seed=0):
    """Weights of a tiny model under their Hugging Face names."""
    config = read_llama(page)
    H, F, D = config.hidden_size, config.intermediate_size, config.head_dim
    N, K = config.num_attention_heads, config.num_key_value_heads
    shapes = {"model.embed_tokens.weight": (config.vocab_size, H), "model.norm.weight": (H,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, H)
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (H,),
            layer + "post_attention_layernorm.weight": (H,),
            layer + "self_attn.q_proj.weight": (N * D, H),
            layer + "self_attn.k_proj.weight": (K * D, H),
            layer + "self_attn.v_proj.weight": (K * D, H),
            layer + "self_attn.o_proj.weight": (H, N * D),
            layer + "mlp.gate_proj.weight": (F, H),
            layer + "mlp.up_proj.weight": (F, H),
            layer + "mlp.down_proj.weight": (H, F),
        }
        if config.attention_bias:
            widths = {"q": N * D, "k": K * D, "v": K * D, "o": H}
            shapes |= {f"{layer}self_attn.{p}_proj.bias": (w,) for p, w in widths.items()}
        if config.mlp_bias:
            widths = {"gate": F, "up": F, "down": H}
            shapes |= {f"{layer}mlp.{p}_proj.bias": (w,) for p, w in widths.items()}
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(folder, weights, page=TINY):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(page), "utf8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def empty(page=TINY):
    with torch.device("meta"):
        return Transformer(read_llama(page))


def load(folder, page=TINY, **options):
    model = empty(page)
    load_weights(model, open_checkpoint(folder), **options)
    return model


@pytest.mark.parametrize("biases", [False, True])
def test_each_weight_arrives_in_its_place(tmp_path, biases):
    page = {**TINY, "attention_bias": biases, "mlp_bias": biases}
    weights = random_weights(page)
    model = load(write(tmp_path, weights, page), page)
    assert len(dict(model.named_parameters())) == len(weights)
    for source, tensor in weights.items():
        assert torch.equal(model.get_parameter(NAME_RULES["llama"](source)), tensor), source
    assert not any(p.is_meta for p in [*model.parameters(), *model.buffers()])


def test_the_loaded_model_owns_its_memory(tmp_path):
    """The file may be replaced or removed afterwards; parameters must not be views of it."""
    weights = random_weights()
    folder = write(tmp_path, weights)
    model = load(folder)
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.write(b"\0" * path.stat().st_size)
    assert torch.equal(model.norm.weight, weights["model.norm.weight"])


def test_rope_buffers_of_a_model_built_on_meta_are_right(tmp_path):
    theta = {**TINY, "rope_theta": 5e5, "head_dim": 8}
    on_meta = load(write(tmp_path, random_weights(theta), theta), theta)
    directly = Transformer(read_llama(theta))
    found = dict(on_meta.named_buffers())
    assert found and found.keys() == dict(directly.named_buffers()).keys()
    for name, buffer in directly.named_buffers():
        assert torch.equal(found[name], buffer), name


def test_a_hollow_buffer_is_an_error(tmp_path):
    model = empty()
    model.register_buffer("table", torch.empty(3, device="meta"))
    with pytest.raises(WeightsError, match="1 buffers have no values, e.g. table"):
        load_weights(model, open_checkpoint(write(tmp_path, random_weights())))
    assert model.norm.weight.is_meta, "nothing may be loaded when something is wrong"


# --- tied heads


@pytest.mark.parametrize("stored", ["embedding only", "head only", "both"])
def test_a_tied_head_loads_from_whatever_is_stored(tmp_path, stored):
    """vllm-project/vllm#6758: tied checkpoints come with and without lm_head.weight; both must load."""
    page = {**TINY, "tie_word_embeddings": True}
    weights = random_weights(page)
    table = weights["model.embed_tokens.weight"]
    if stored == "both":
        weights["lm_head.weight"] = table.clone()
    if stored == "head only":
        weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    folder = write(tmp_path, weights, page)
    model = load(folder, page, dtype=torch.bfloat16)
    assert model.lm_head.weight is model.embed.weight
    assert torch.equal(model.lm_head.weight, table.bfloat16())
    spare = [row for row in weight_map(open_checkpoint(folder), empty(page)) if row.target is None]
    assert [row.source for row in spare] == (["lm_head.weight"] if stored == "both" else [])


def test_a_tied_head_that_differs_is_an_error(tmp_path):
    page = {**TINY, "tie_word_embeddings": True}
    weights = random_weights(page)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    model = empty(page)
    with pytest.raises(
        WeightsError, match=r"tie_word_embeddings.*differ.*set tie_word_embeddings to false"
    ):
        load_weights(model, open_checkpoint(write(tmp_path, weights, page)))
    assert model.embed.weight.is_meta


def test_an_untied_head_that_is_missing_says_how_to_tie(tmp_path):
    weights = random_weights()
    del weights["lm_head.weight"]
    with pytest.raises(WeightsError, match='"tie_word_embeddings": true') as error:
        load(write(tmp_path, weights))
    assert "missing     lm_head.weight [40, 16]" in str(error.value)


# --- what does not fit


def test_everything_wrong_is_listed_in_one_error(tmp_path):
    weights = random_weights()
    del weights["model.norm.weight"], weights["model.layers.1.self_attn.q_proj.weight"]
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(25, 16)
    weights["model.embed_tokens.weight"] = torch.zeros(39, 16)
    weights["model.layers.2.input_layernorm.weight"] = torch.zeros(16)
    weights["visual.patch.weight"] = torch.zeros(3)
    with pytest.raises(WeightsError) as error:
        load(write(tmp_path, weights))
    lines = [" ".join(line.split()) for line in str(error.value).splitlines()]
    assert lines[0] == "the weights do not fit the model (6 problems):"
    assert set(lines[1:]) == {
        "missing norm.weight [16]",
        "missing layers.1.attn.q_proj.weight [16, 16]",
        "unexpected visual.patch.weight",
        "unexpected model.layers.2.input_layernorm.weight (would be layers.2.attn_norm.weight, "
        "which this model does not have)",
        "mis-shaped model.layers.0.mlp.up_proj.weight is [25, 16], the config makes "
        "layers.0.ffn.up_proj.weight [24, 16]",
        "mis-shaped model.embed_tokens.weight is [39, 16], the config makes embed.weight [40, 16]",
    }


def test_two_sources_for_one_target_are_an_error(tmp_path):
    weights = random_weights()
    weights["norm.weight"] = weights["model.norm.weight"] + 1
    with pytest.raises(
        WeightsError, match=r"model\.norm\.weight and norm\.weight: both for norm\.weight"
    ):
        load(write(tmp_path, dict(sorted(weights.items()))))


def test_quantized_weights_of_another_program_are_named(tmp_path):
    page = {**TINY, "quantization_config": {"quant_method": "gptq"}}
    weights = random_weights()
    name = "model.layers.0.mlp.up_proj."
    weights[name + "qweight"] = weights.pop(name + "weight")
    with pytest.raises(WeightsError, match="quantized by another program"):
        load(write(tmp_path, weights, page), page)


def test_old_inv_freq_buffers_are_skipped_with_a_reason(tmp_path):
    weights = random_weights()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
    folder = write(tmp_path, weights)
    load(folder)
    (row,) = [r for r in weight_map(open_checkpoint(folder), empty()) if r.target is None]
    assert row.source.endswith("inv_freq") and "config" in row.note


def test_a_checkpoint_without_the_model_prefix_loads(tmp_path):
    weights = {k.removeprefix("model."): v for k, v in random_weights().items()}
    assert torch.equal(load(write(tmp_path, weights)).norm.weight, weights["norm.weight"])


def test_rules_may_cut_one_stored_tensor_into_several(tmp_path, monkeypatch):
    """As GPT-NeoX's fused query_key_value will need; shapes are checked after the cut, nothing is read for it."""
    weights = random_weights()
    for i in range(2):
        names = [f"model.layers.{i}.self_attn.{p}_proj.weight" for p in "qkv"]
        weights[f"model.layers.{i}.fused"] = torch.cat([weights.pop(n) for n in names])
    plain = random_weights()

    def part(start, stop):
        return lambda tensor, config: tensor[start:stop]

    cuts = {"q": part(0, 16), "k": part(16, 24), "v": part(24, 32)}
    fused = [
        Rule(r"model\.layers\.(\d+)\.fused", rf"layers.\1.attn.{p}_proj.weight", change=cut)
        for p, cut in cuts.items()
    ]
    monkeypatch.setitem(NAME_RULES, "llama", NameRules([*NAME_RULES["llama"], *fused]))
    model = load(write(tmp_path, weights))
    for p in "qkv":
        stored = plain[f"model.layers.1.self_attn.{p}_proj.weight"]
        assert torch.equal(model.get_parameter(f"layers.1.attn.{p}_proj.weight"), stored)


def test_name_rules_match_whole_names():
    rules = NAME_RULES["llama"]
    assert rules("model.layers.31.self_attn.o_proj.bias") == "layers.31.attn.o_proj.bias"
    assert rules("model.layers.3.mlp.down_proj.weight") == "layers.3.ffn.down_proj.weight"
    for name in ("xmodel.norm.weight", "model.norm.weight2", "model.layers.x.mlp.up_proj.weight"):
        assert rules(name) is None and rules.matches(name) == [], name


# --- number formats


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [None, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(tmp_path, stored, wanted):
    weights = {name: w.to(stored) for name, w in random_weights().items()}
    folder = write(tmp_path, weights)
    model = load(folder, dtype=wanted)
    assert {p.dtype for p in model.parameters()} == {wanted or stored}
    expected = weights["model.norm.weight"].to(wanted or stored)
    assert torch.equal(model.norm.weight, expected)
    assert {info.dtype for info in open_checkpoint(folder).tensors.values()} == {stored}
    assert all(b.dtype == torch.float32 for b in model.buffers() if b.is_floating_point())


# --- files and folders


def shard(folder, weights):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY), "utf8")
    names, where = sorted(weights), {}
    for i in range(3):
        part = {name: weights[name] for name in names[i::3]}
        file = f"model-0000{i + 1}-of-00003.safetensors"
        save_file(part, folder / file)
        where |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return where


def test_shards_load_like_one_file(tmp_path):
    weights = random_weights()
    shard(tmp_path / "shards", weights)
    one, three = load(write(tmp_path / "one", weights)), load(tmp_path / "shards")
    for name, weight in one.named_parameters():
        assert torch.equal(three.get_parameter(name), weight), name
    checkpoint = open_checkpoint(tmp_path / "shards")
    assert checkpoint.bytes == sum(w.nbytes for w in weights.values())
    assert checkpoint.tensors.keys() == weights.keys()


def test_a_missing_shard_is_named(tmp_path):
    """sgl-project/sglang#32279: a shard that the index names was not there, and its weights stayed uninitialized."""
    shard(tmp_path, random_weights())
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        WeightsError, match="1 of 3 weight files are missing: model-00002-of-00003.safetensors"
    ):
        open_checkpoint(tmp_path)


def test_an_index_that_promises_too_much(tmp_path):
    where = shard(tmp_path, random_weights())
    where["model.other.weight"] = "model-00001-of-00003.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    with pytest.raises(WeightsError, match=r"index says.*not, e\.g\. 'model\.other\.weight'"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(WeightsError, match="not a weights index"):
        open_checkpoint(tmp_path)


GOOD = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
GOOD = struct.pack("<Q", len(GOOD)) + GOOD + bytes(8)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "an empty file"),
        (b"<!doctype html><html>Not Found</html>", "text, it begins with '<!doctype html>"),
        (b"404", "text, it begins with '404'"),
        (GOOD[:-3], r"promises 70 bytes, the file has 67.*cut off"),
        (GOOD[:20], "may be cut off"),
        (GOOD + b"tail", "promises 70 bytes, the file has 74"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 538090408\n",
            r"Git LFS pointer.*git lfs pull",
        ),
        (b"PK\x03\x04" + bytes(60), "a PyTorch pickle under the name of a safetensors file"),
        (b"\x80\x02}q\x00." + bytes(60), "a PyTorch pickle"),
        (b"GGUF" + bytes(60), "a GGUF file under another name"),
        (struct.pack("<Q", 4) + b"{oh}", "header cannot be understood"),
        (struct.pack("<Q", 11) + b'{"a": "F9"}', "header cannot be understood"),
        (struct.pack("<Q", 2**62) + bytes(60), "not a safetensors file"),
        (b"tjgg" + bytes(60), "came before GGUF"),
        (GOOD.replace(b"[2]", b"[3]"), "header cannot be understood.*bytes 0 to 8, for 12"),
        (GOOD.replace(b"F32", b"F64"), "header cannot be understood.*bytes 0 to 8, for 16"),
        (GOOD.replace(b"[0,8]", b"[1,8]"), "header cannot be understood.*bytes 1 to 8"),
        (GOOD.replace(b"[0,8]", b"[8,0]"), "header cannot be understood.*bytes 8 to 0"),
        (GOOD.replace(b"[2]", b"-12"), "header cannot be understood"),
    ],
)
def test_files_that_are_not_what_their_name_says(tmp_path, content, says):
    """safetensors#414: text, pickles and pointers named .safetensors were all answered with "header too large"."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=says) as error:
        read_header(path)
    assert str(path) in str(error.value)
    with pytest.raises(WeightsError, match=says):
        open_checkpoint(tmp_path)


def test_a_good_file_in_few_bytes(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(GOOD)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors["a"].shape == (2,) and checkpoint.bytes == 8
    assert checkpoint.read("a").tolist() == [0.0, 0.0]
    with pytest.raises(WeightsError, match="has no tensor 'b'"):
        checkpoint.read("b")
    with (tmp_path / "model.safetensors").open("rb") as file:
        assert parse_header(file)[1] == len(GOOD) - 8


def test_every_number_format_is_read_as_the_library_reads_it(tmp_path):
    kinds = sorted(DTYPES.values(), key=lambda kind: -kind.itemsize)
    weights = {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in kinds}
    weights |= {"one": torch.tensor(2.5), "none": torch.empty(0, 4)}
    save_file(weights, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        read = checkpoint.read(name)
        assert read.dtype == tensor.dtype and read.shape == tensor.shape
        assert torch.equal(read.view(torch.uint8), tensor.view(torch.uint8)) if read.ndim else True
    assert checkpoint.read("one").item() == 2.5


def test_the_header_is_read_once_however_many_tensors_there_are(tmp_path):
    """Once the whole header was parsed again for each tensor: 4,608 small ones took four minutes."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(3.0), "b": torch.arange(4)}, path)
    checkpoint = open_checkpoint(tmp_path)
    with path.open("r+b") as file:  # no second look at it could succeed
        file.write(b"\xff" * 60)
    assert checkpoint.read("a").tolist() == [0, 1, 2]
    assert checkpoint.read("b").tolist() == [0, 1, 2, 3]


def test_a_file_that_becomes_shorter_after_it_was_opened(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(GOOD)
    checkpoint = open_checkpoint(tmp_path)
    path.write_bytes(GOOD[:-3])
    with pytest.raises(WeightsError, match="ends within a, after 5 of 8 bytes"):
        checkpoint.read("a")


def test_what_is_read_is_no_view_of_the_file(tmp_path):
    """What is let go is gone, and what is kept does not change with the file."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3)}, path)
    kept = open_checkpoint(tmp_path).read("a")
    kept += 1
    assert open_checkpoint(tmp_path).read("a").tolist() == [1, 1, 1]
    with path.open("r+b") as file:
        file.seek(-12, 2)
        file.write(bytes(12))
    assert kept.tolist() == [2, 2, 2]


def test_folders_without_safetensors(tmp_path):
    with pytest.raises(WeightsError, match="no such folder"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(WeightsError, match="Is it the right folder"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(WeightsError, match="convert_gguf"):
        open_checkpoint(tmp_path, "safetensors")
    (tmp_path / "model.gguf").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"pickles \(pytorch_model.bin\).*weights_only=True"):
        open_checkpoint(tmp_path)


def test_a_pickle_is_never_opened(tmp_path):
    """A pickle runs what its author wrote. Ours would leave a file behind; it must not be there afterwards."""
    import pickle

    trace = tmp_path / "ran"

    class Intruder:
        def __reduce__(self):
            return open, (str(trace), "w")

    content = pickle.dumps(Intruder())
    for name in ("pytorch_model.bin", "model.safetensors"):
        folder = tmp_path / name.split(".")[-1]
        folder.mkdir()
        (folder / name).write_bytes(content)
        with pytest.raises(WeightsError, match="pickle"):
            open_checkpoint(folder)
    assert not trace.exists()
    pickle.loads(content).close()
    assert trace.exists(), "the test's own pickle should have worked"


def test_opening_reads_no_weights(tmp_path):
    """A header of a file with holes where its weights should be: opening must not mind, nor take their space."""
    header = b'{"w":{"dtype":"F32","shape":[1000000000],"data_offsets":[0,4000000000]}}'
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 4_000_000_000)
    assert open_checkpoint(tmp_path).bytes == 4_000_000_000


def test_loaders_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(LOADERS, "counting", lambda folder: LOADERS["safetensors"](folder))
    folder = write(tmp_path, random_weights())
    assert len(open_checkpoint(folder, "counting").tensors) == len(random_weights())
    with pytest.raises(ValueError, match="unknown weights format 'zip'"):
        open_checkpoint(folder, "zip")


# --- memory


def test_memory_line():
    line = memory_line(empty(), torch.bfloat16)
    count = sum(p.numel() for p in empty().parameters())
    assert line.startswith(f"{count:,} weights as bfloat16: 0.00 GB; cpu has ")
    assert available_memory("cpu") > 10**8


def test_memory_line_says_when_it_will_not_fit(tmp_path, monkeypatch):
    checkpoint = open_checkpoint(write(tmp_path, random_weights()))
    monkeypatch.setattr("llm_engine.weights.available_memory", lambda device: 1000)
    assert "will not fit: choose a smaller model, or dtype bfloat16" in memory_line(checkpoint)
    assert "will not fit: choose a smaller model." in memory_line(checkpoint, torch.float16)


def test_loading_never_holds_two_copies(tmp_path):
    """The peak of memory is the model and little more, in a process of its own (Linux counts it in VmHWM)."""
    import pathlib
    import subprocess
    import sys

    if not pathlib.Path("/proc/self/status").exists():
        pytest.skip("needs /proc")
    page = {**TINY, "vocab_size": 25_000, "hidden_size": 512, "intermediate_size": 2048}
    page |= {"num_hidden_layers": 12}
    write(tmp_path, {n: w.half() for n, w in random_weights(page).items()}, page)
    script = f"""
import torch, re, pathlib
from llm_engine.config import load_config
from llm_engine.transformer import Transformer
from llm_engine.weights import load_weights, open_checkpoint
def peak(): return int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
def anonymous(): return int(re.search(r"RssAnon:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
before = anonymous()
with torch.device("meta"):
    model = Transformer(load_config({str(tmp_path)!r}))
assert anonymous() - before < 20e6, "a model on meta takes no memory"
load_weights(model, open_checkpoint({str(tmp_path)!r}), dtype=torch.float32)
size = sum(p.nbytes for p in model.parameters())
print((anonymous() - before) / size)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.15


# --- the real model


def test_the_default_model_loads_whole(default_folder):
    config = load_config(default_folder)
    checkpoint = open_checkpoint(default_folder)
    assert len(checkpoint.tensors) == 272 and checkpoint.bytes == 538_060_032
    with torch.device("meta"):
        model = Transformer(config)
    rows = weight_map(checkpoint, model)
    assert all(row.target for row in rows)
    table = weight_table(rows).splitlines()
    assert len(table) == 273 and table[0].split() == ["source", "target", "shape", "dtype"]
    assert any("layers.29.attn.k_proj.weight" in line and "[192, 576]" in line for line in table)


def test_the_default_model_in_a_wrong_shape_is_refused(default_folder):
    config = dataclasses.replace(load_config(default_folder), num_hidden_layers=29, head_dim=32)
    with torch.device("meta"):
        model = Transformer(config)
    with pytest.raises(WeightsError) as error:
        weight_map(open_checkpoint(default_folder), model)
    assert "(125 problems)" in str(error.value)  # 9 too many, 4 mis-shaped in each of 29 layers


def test_load_model_uses_all_this(tmp_path):
    weights = random_weights()
    model = load_model(write(tmp_path, weights), dtype=torch.bfloat16)
    assert model.norm.weight.dtype == torch.bfloat16 and not model.training
    assert torch.equal(model.norm.weight, weights["model.norm.weight"].bfloat16())
