"""Quantized while loading, saved, loaded again: equal to the bit, complete folders, and each damage by its name."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_folder import write_tiny_folder
from typer.testing import CliRunner

from llm_engine import Engine, SamplingParams
from llm_engine.attention import single
from llm_engine.cli import app
from llm_engine.config import load_config
from llm_engine.int4 import collect_inputs, random_tokens, weighted
from llm_engine.quantize import (
    QuantizationError,
    QuantizedEmbedding,
    QuantizedLinear,
    Scheme,
    quantize_model,
    round_to_nearest,
)
from llm_engine.quantized_files import (
    FILE,
    OwnedEmbedding,
    QuantizedCheckpoint,
    Recipe,
    by_slices,
    find_recipe,
    save_quantized,
    write_safetensors,
)
from llm_engine.transformer import QUANTIZERS, load_model
from llm_engine.weights import WeightsError, open_checkpoint, read_header

TIED = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def model_folder(path, tied=True, **changes):
    """A tiny model's folder; `tied`: with one table for the embedding and the head."""
    folder = write_tiny_folder(path, **changes)
    if tied:
        config = json.loads((folder / "config.json").read_text("utf8"))
        (folder / "config.json").write_text(
            json.dumps({**config, "tie_word_embeddings": True}), "utf8"
        )
        tensors = load_file(folder / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def tiny(tmp_path):
    return model_folder(tmp_path / "tiny")


def logits(model, ids=(1, 2, 3, 250)):
    from llm_engine.attention import NoCache
    from llm_engine.transformer import TorchRunner

    every = torch.arange(len(ids))[None]
    cache = NoCache(model.config, 1, "cpu", torch.float32)
    return TorchRunner(model).logits(single(list(ids)), cache, every)


def edit(folder, change):
    """Rewrite a quantized file with `change(tensors, metadata)` done to it."""
    from safetensors import safe_open

    path = folder / FILE
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = dict(file.metadata())
    change(tensors, metadata)
    save_file(tensors, path, metadata)


# ---- while loading


@TIED
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("name", ["int8", "int8-rtn", "int4", "int4-rtn"])
def test_quantized_while_loading_is_quantized_after_loading(tmp_path, name, tied, biases):
    """Tensor by tensor gives the same codes as `quantize_model` on the loaded model."""
    folder = model_folder(tmp_path / "m", tied, attention_bias=biases, mlp_bias=biases)
    recipe = QUANTIZERS[name]
    model = load_model(folder, quantize=name)
    how = {"skip": (), "mixed": {"lm_head": recipe.head}}
    other = quantize_model(load_model(folder), recipe.scheme, **how)
    if recipe.listen:  # listened to, and quantized anew
        first = load_model(folder, quantize=f"{name}-rtn")
        loud = collect_inputs(first, random_tokens(first.config.vocab_size))
        rounded = other.layers[0].ffn.up_proj.packed
        other = quantize_model(load_model(folder), recipe.scheme, **how, method=weighted(loud))
        assert not torch.equal(rounded, other.layers[0].ffn.up_proj.packed)
    ours, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    for parameter in theirs:
        if parameter != "embed.weight":
            assert torch.equal(ours[parameter], theirs[parameter]), parameter
    assert not [p for p in ours.values() if p.is_meta or p.requires_grad]
    if tied:
        assert ours.keys() == theirs.keys()
        assert model.embed.head is model.lm_head
        assert torch.equal(logits(model), logits(other))
    else:
        assert isinstance(model.embed, OwnedEmbedding) and "embed.table.packed" in ours
        float_table = load_model(folder).embed.weight
        assert torch.equal(
            model.embed.table.packed, round_to_nearest(float_table, recipe.head, "").packed
        )
    off = (logits(model) - logits(load_model(folder))).norm() / logits(load_model(folder)).norm()
    assert 0 < off < (0.03 if recipe.scheme.bits == 8 else 0.3)


def test_slices_change_nothing():
    weight = torch.randn(700, 60).to(torch.bfloat16)
    import llm_engine.quantized_files as module

    for scheme in (Scheme(8), Scheme(4, 16), Scheme(4, 32, False)):
        whole = round_to_nearest(weight.float(), scheme, "")
        before, module.SLICE = module.SLICE, 6000  # a hundred rows at a time
        try:
            parts = by_slices(round_to_nearest, weight, scheme, "w")
        finally:
            module.SLICE = before
        for a, b in zip(whole, parts, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


def test_norms_stay_and_follow_the_dtype(tiny):
    model = load_model(tiny, quantize="int8", dtype=torch.bfloat16)
    assert model.norm.weight.dtype == torch.bfloat16
    assert model.layers[0].ffn.up_proj.scale.dtype == torch.float16
    assert model(single([1, 2]), _none(model)).dtype == torch.bfloat16


def _none(model):
    from llm_engine.attention import NoCache

    return NoCache(model.config, 1, "cpu", torch.bfloat16)


def test_single_modules_may_have_a_scheme_of_their_own(tiny):
    recipe = Recipe(
        "mine", Scheme(4, 16), None, mixed=(("layers.0.*", Scheme(8)), ("*.k_proj", None))
    )
    model = load_model(tiny, quantize=recipe)
    assert model.layers[0].attn.k_proj.scheme == Scheme(8), "the first pattern that matches"
    assert type(model.layers[1].attn.k_proj) is torch.nn.Linear
    assert model.layers[1].ffn.up_proj.scheme == Scheme(4, 16)
    assert model.lm_head.weight is model.embed.weight, "head None: left alone, still shared"
    assert logits(model).isfinite().all()
    for pattern in ("nothing.*", "layers.0", "*norm"):  # a module's name is not enough
        wrong = Recipe("x", Scheme(8), None, mixed=((pattern, None),))
        with pytest.raises(QuantizationError, match=r"' matches no linear module or embedding"):
            load_model(tiny, quantize=wrong)


@TIED
def test_a_shared_table_goes_by_both_names(tmp_path, tied):
    folder = model_folder(tmp_path / "m", tied)
    for mixed, head, table in (
        ((("lm_head", Scheme(4, 16)),), Scheme(4, 16), Scheme(8)),
        ((("embed", Scheme(4, 16)),), Scheme(8), Scheme(4, 16)),
        ((("embed", Scheme(4, 32)), ("lm_head", Scheme(4, 16))), Scheme(4, 16), Scheme(4, 32)),
    ):
        model = load_model(folder, quantize=Recipe("x", Scheme(8), Scheme(8), mixed=mixed))
        if tied:
            head = table = head if mixed[-1][0] == "lm_head" else table
            assert model.embed.head is model.lm_head
        assert model.lm_head.scheme == head and model.embed.head.scheme == table
    alone = load_model(
        folder, quantize=Recipe("x", Scheme(8), Scheme(8), mixed=(("lm_head", None),))
    )
    assert type(alone.lm_head) is torch.nn.Linear
    assert isinstance(alone.embed, OwnedEmbedding) != tied
    assert not tied or alone.lm_head.weight is alone.embed.weight


def test_recipes_by_name():
    assert find_recipe("int4") is QUANTIZERS["int4"]
    made = find_recipe("int4-g32-asym")
    assert made.scheme == Scheme(4, 32, False) and made.head == Scheme(8)
    assert find_recipe("int8-g32").head == Scheme(8, 32)
    with pytest.raises(
        QuantizationError, match=r"unknown scheme 'int5x'.*Recipes: int4, int4-rtn, int8"
    ):
        find_recipe("int5x")


def test_the_name_of_a_scheme_will_do_wherever_a_quantization_is_asked_for(tiny, tmp_path):
    engine = Engine.from_pretrained(tiny, quantize="int4-g32-asym", runner="torch")
    assert engine.model.layers[0].ffn.up_proj.scheme == Scheme(4, 32, False)
    assert engine.model.lm_head.scheme == Scheme(8)
    assert "int4-g32-asym" not in QUANTIZERS, "made when it is asked for"
    done = run("generate", "ab", "-m", str(tiny), "--quantize", "int4-g16", "-n", "2")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("int4-g3", "a group of 3 columns.*take an even group, 4 for instance"),
        ("int5", "bits must be 4 or 8, not 5"),
        ("int8-g0", "at least 1 column, not 0"),
        ("int4-g7x", "'int4-g7x'.*Schemes are written int8.*Recipes: int4, int4-rtn, int8, int8-rtn"),
        ("q4", "'q4'.*Schemes are written int8.*Recipes: int4"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_quantization_is_said_wherever_it_is_asked_for(tiny, name, says):
    """The way out is the same in Python, at loading and on the command line, before anything is loaded."""
    for ask in (
        lambda: load_model(tiny, quantize=name),
        lambda: Engine.from_pretrained(tiny.parent / "nothing", quantize=name),
        lambda: find_recipe(name),
    ):
        with pytest.raises(QuantizationError, match=says):
            ask()
    done = run("generate", "ab", "-m", str(tiny), "--quantize", name, "-n", "2")
    assert done.exit_code != 0 and "Traceback" not in done.output
    assert re.search(says.split(".*")[0], " ".join(done.output.split()))


def test_nan_and_missing_weights_are_named_before_anything_is_made(tiny):
    path = tiny / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    broken = tensors[name].clone()
    broken[3, 5] = torch.nan
    save_file({**tensors, name: broken}, path)
    with pytest.raises(QuantizationError, match=r"layers\.1\.ffn\.up_proj holds nan in row 3"):
        load_model(tiny, quantize="int8")
    save_file({n: t for n, t in tensors.items() if n != name}, path)
    with pytest.raises(WeightsError, match=r"missing +layers\.1\.ffn\.up_proj\.weight"):
        load_model(tiny, quantize="int4")


def test_two_tables_where_one_is_shared_must_agree(tiny):
    path = tiny / "model.safetensors"
    tensors = load_file(path)
    table = tensors.pop("lm_head.weight", tensors.get("model.embed_tokens.weight"))
    tensors |= {"model.embed_tokens.weight": table, "lm_head.weight": table.clone()}
    save_file(tensors, path)
    same = load_model(tiny, quantize="int8")
    assert same.embed.head is same.lm_head
    save_file({**tensors, "lm_head.weight": table + 1}, path)
    with pytest.raises(WeightsError, match="tie_word_embeddings, but .* differ"):
        load_model(tiny, quantize="int8")


# ---- saved and loaded


@TIED
@pytest.mark.parametrize("name", ["int8", "int4", "int4-g16-asym"])
def test_what_is_saved_comes_back_to_the_bit(tmp_path, name, tied):
    folder = model_folder(tmp_path / "m", tied, attention_bias=True, mlp_bias=True)
    recipe = find_recipe(name)
    model = load_model(folder, quantize=recipe)
    written = save_quantized(model, tmp_path / "sub" / "q", folder, recipe.name)
    again = load_model(written)
    ours, theirs = dict(model.named_parameters()), dict(again.named_parameters())
    assert ours.keys() == theirs.keys()
    for parameter, weight in ours.items():
        assert torch.equal(weight, theirs[parameter]) and weight.dtype == theirs[parameter].dtype
    assert torch.equal(logits(model), logits(again))
    assert open_checkpoint(written).bytes == sum(p.nbytes for p in ours.values())
    assert not [p for p in (tmp_path / "sub").iterdir() if p.name != "q"], "no draft is left behind"
    half = load_model(written, dtype=torch.bfloat16)
    assert half.norm.weight.dtype == torch.bfloat16 == half.embed(torch.tensor([[1]])).dtype
    assert half.layers[0].attn.q_proj.bias.dtype == torch.bfloat16
    assert torch.equal(half.lm_head.packed, model.lm_head.packed)


def test_a_model_quantized_in_place_can_be_saved_too(tiny, tmp_path):
    model = quantize_model(load_model(tiny), Scheme(4, 16))  # the head and its table stay in float
    again = load_model(save_quantized(model, tmp_path / "q", tiny))
    assert again.lm_head.weight is again.embed.weight
    assert torch.equal(logits(model), logits(again))
    assert open_checkpoint(tmp_path / "q").recipe == "mixed"


def test_the_folder_is_complete(tiny, tmp_path):
    model = load_model(tiny, quantize="int4")
    (tiny / "notes.txt").write_text("kept", "utf8")
    (tiny / "model.safetensors.index.json").write_text("{}", "utf8")
    written = save_quantized(model, tmp_path / "q", tiny, "int4")
    names = {p.name for p in written.iterdir()}
    assert {FILE, "config.json", "tokenizer.json", "tokenizer_config.json", "notes.txt"} == names
    params = SamplingParams(max_new_tokens=5)
    both = [
        Engine.from_pretrained(tiny, quantize="int4", runner="torch")
        .generate("abc", params)
        .token_ids,
        Engine.from_pretrained(written, runner="torch").generate("abc", params).token_ids,
    ]
    assert both[0] == both[1]


def test_other_programs_can_read_the_file_but_do_not_take_it_for_weights(tiny, tmp_path):
    model = load_model(tiny, quantize="int8")
    written = save_quantized(model, tmp_path / "q", tiny, "int8")
    theirs = load_file(written / FILE)  # the safetensors library itself
    for name, weight in model.named_parameters():
        assert torch.equal(theirs[name], weight)
    for info in read_header(written / FILE).values():
        assert info.file == written / FILE
    transformers = pytest.importorskip("transformers")
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        transformers.AutoModelForCausalLM.from_pretrained(written)


def test_every_tensor_begins_at_a_multiple_of_its_size(tmp_path):
    tensors = {
        "odd": torch.arange(7, dtype=torch.int8),
        "half": torch.ones(3, dtype=torch.float16),
        "float": torch.ones(5, 3),
        "view": torch.arange(12.0).view(3, 4).T,
    }
    write_safetensors(tmp_path / "x.safetensors", tensors, {"a": "b"})
    raw = (tmp_path / "x.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    for name, tensor in tensors.items():
        assert header[name]["data_offsets"][0] % tensor.itemsize == 0
    for name, tensor in load_file(tmp_path / "x.safetensors").items():
        assert torch.equal(tensor, tensors[name])


# ---- what can be wrong


@pytest.fixture
def saved(tiny, tmp_path):
    return save_quantized(load_model(tiny, quantize="int8"), tmp_path / "q", tiny, "int8")


def test_another_scheme_than_the_stored_one(saved, tiny):
    assert load_model(saved, quantize="int8").lm_head.scheme == Scheme(8), "the same is no error"
    with pytest.raises(WeightsError, match="quantized already, as int8; int4 was asked for"):
        load_model(saved, quantize="int4")
    with pytest.raises(QuantizationError, match="bits must be 4 or 8, not 3"):
        Engine.from_pretrained(saved, quantize="int3")


def test_a_newer_format(saved):
    edit(saved, lambda tensors, metadata: metadata.update(version="2"))
    with pytest.raises(
        WeightsError, match="format version 2, and this program reads up to 1. Update"
    ):
        load_model(saved)


@pytest.mark.parametrize("key", ["schemes", "recipe", "checksums"])
def test_metadata_without_a_part(saved, key):
    edit(saved, lambda tensors, metadata: metadata.pop(key))
    with pytest.raises(WeightsError, match=f"does not say how it is quantized.*{key}"):
        open_checkpoint(saved)


def test_an_unknown_scheme_in_the_metadata(saved):
    edit(saved, lambda t, metadata: metadata.update(schemes='{"lm_head": "int3"}'))
    with pytest.raises(WeightsError, match="bits must be 4 or 8, not 3"):
        open_checkpoint(saved)


def test_a_missing_scale_and_a_foreign_tensor_in_one_error(saved):
    def change(tensors, metadata):
        tensors["stranger"] = tensors.pop("layers.1.attn.k_proj.scale")
        tensors["layers.0.attn.k_proj.scale"] = tensors["layers.0.attn.k_proj.scale"][:3].clone()
        tensors["lm_head.packed"] = tensors["lm_head.packed"].to(torch.int32)

    edit(saved, change)
    with pytest.raises(WeightsError) as error:
        load_model(saved)
    text = str(error.value)
    assert "4 problems" in text
    for line in (
        r"missing     layers.1.attn.k_proj.scale [16, 1]",
        r"unexpected  stranger",
        r"mis-shaped  layers.0.attn.k_proj.scale is [3, 1]",
        r"mis-typed   lm_head.packed is torch.int32, not torch.int8",
    ):
        assert line in text


def test_the_config_of_another_model(saved):
    config = json.loads((saved / "config.json").read_text("utf8"))
    (saved / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}), "utf8")
    with pytest.raises(
        WeightsError, match=r"gives layers\.1\.\S+ the scheme int8, and this model has no"
    ):
        load_model(saved)


def test_one_flipped_bit(saved):
    path = saved / FILE
    raw = bytearray(path.read_bytes())
    raw[-9] ^= 4
    path.write_bytes(raw)
    with pytest.raises(WeightsError, match="is not what was written, its checksum differs"):
        load_model(saved)


def test_a_file_cut_short_or_not_fetched(saved):
    path = saved / FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(WeightsError, match=r"quantized\.safetensors"):
        load_model(saved)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n")
    with pytest.raises(WeightsError, match="Git LFS pointer"):
        load_model(saved)
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(WeightsError, match="not written by save_quantized"):
        load_model(saved)


def test_nothing_is_overwritten_and_nothing_left_behind(tiny, saved, tmp_path, monkeypatch):
    model = load_model(tiny, quantize="int8")
    with pytest.raises(FileExistsError, match="is there already, and not empty"):
        save_quantized(model, saved, tiny)
    (tmp_path / "empty").mkdir()
    assert (save_quantized(model, tmp_path / "empty", tiny) / FILE).exists()
    import llm_engine.quantized_files as module

    monkeypatch.setattr(
        module, "write_safetensors", lambda *a: (_ for _ in ()).throw(OSError("full"))
    )
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="full"):
        save_quantized(model, tmp_path / "new", tiny)
    assert sorted(tmp_path.iterdir()) == before


def test_what_cannot_be_saved(tiny, tmp_path):
    with pytest.raises(QuantizationError, match="no module of this model is quantized"):
        save_quantized(load_model(tiny), tmp_path / "q", tiny)
    from llm_engine.quantize import DynamicLinear

    model = quantize_model(load_model(tiny), Scheme(8), linear=DynamicLinear)
    with pytest.raises(QuantizationError, match="is a DynamicLinear: only its weights"):
        save_quantized(model, tmp_path / "q", tiny)
    assert not (tmp_path / "q").exists()


def test_an_ordinary_folder_is_not_taken_for_one(tiny):
    assert not QuantizedCheckpoint.recognizes(tiny)
    assert type(open_checkpoint(tiny)) is not QuantizedCheckpoint


# ---- the command


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_the_command_writes_a_folder_that_generates(tiny, tmp_path):
    out = run("quantize", str(tiny), str(tmp_path / "q"), "--scheme", "int4-g16")
    assert out.exit_code == 0, out.output
    assert out.stdout.strip() == str(tmp_path / "q")
    assert "MB of weights became" in out.stderr
    made = open_checkpoint(tmp_path / "q")
    assert made.recipe == "int4-g16" and made.schemes["layers.0.ffn.up_proj"] == Scheme(4, 16)
    assert run("generate", "abc", "-m", str(tmp_path / "q"), "-n", "3").exit_code == 0
    again = run("quantize", str(tiny), str(tmp_path / "q"))
    assert again.exit_code == 1 and "not empty" in again.stderr
    wrong = run("quantize", str(tiny), str(tmp_path / "z"), "-s", "int7")
    assert wrong.exit_code == 1 and "bits must be 4 or 8" in wrong.stderr


# ---- the real model


def test_the_real_model_never_needs_two_copies(tiny, default_folder):
    """Most memory while loading in a process of its own: the quantized model, the largest tensor, and little more.

    A tiny model goes first: what torch's libraries take when they are first used is no part of it.
    """
    code = """
import resource, sys
import torch
from llm_engine.transformer import load_model
import llm_engine
torch.set_num_threads(1)
def peak():
    try:  # Linux; its ru_maxrss would include what the parent process had
        lines = open("/proc/self/status").read().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
load_model(sys.argv[2], quantize="int8")
before = peak()
model = load_model(sys.argv[1], quantize="int8")
print(peak() - before, sum(p.nbytes for p in model.parameters()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(default_folder), str(tiny)],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True,
    )  # fmt: skip
    grown, weights = map(int, done.stdout.split())
    largest = max(
        i.dtype.itemsize * i.shape[0] * i.shape[-1]
        for i in open_checkpoint(default_folder).tensors.values()
    )
    assert weights < 136_000_000
    assert (
        grown
        < weights + largest + 80_000_000
        < 4 * load_config(default_folder).vocab_size * 576 * 4
    )


def test_the_real_model_still_knows_paris(default_folder, tmp_path):
    model = load_model(default_folder, quantize="int8")
    written = save_quantized(model, tmp_path / "q", default_folder, "int8")
    assert (written / FILE).stat().st_size < 135_500_000
    engine = Engine.from_pretrained(written, runner="torch")
    text = engine.generate("The capital of France is", SamplingParams(max_new_tokens=2)).text
    assert text == " Paris."
    seconds = []
    for _ in range(2):
        begin = time.process_time()
        load_model(written)
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 5, "of computing, on a busy machine too: nothing is rounded once more"
    assert isinstance(engine.model.embed, QuantizedEmbedding)
    assert all(type(b.ffn.up_proj) is QuantizedLinear for b in engine.model.layers)
    assert Path(written / "tokenizer.json").exists()
