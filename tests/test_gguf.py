"""Chapter 34: GGUF files, read by a parser of our own, unpacked, and kept in their blocks."""

import json
import math
import struct

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, quants
from hypothesis import given
from hypothesis import strategies as st
from test_hub import TEMPLATE, TEXTS, byte_tokens
from test_tokenizer import CORPUS, PROMPTS

from llm_engine import Engine, SamplingParams
from llm_engine.config import RopeConfig, load_config
from llm_engine.gguf_files import (
    BLOCK_TYPES,
    STORED_SCHEMES,
    GGUFCheckpoint,
    GGUFError,
    gguf_folder,
    read_gguf_header,
    rope_from_factors,
)
from llm_engine.hub import HubError, gguf_file, resolve
from llm_engine.memory import plan
from llm_engine.quantize import QuantizedEmbedding, QuantizedLinear
from llm_engine.quantized_files import QuantizedCheckpoint, save_quantized
from llm_engine.rope import base_frequencies, llama3_frequencies
from llm_engine.tokenizer import Tokenizer
from llm_engine.transformer import load_model
from llm_engine.weights import NAME_RULES, NameRules, WeightsError, open_checkpoint

KINDS = {block.name: GGMLQuantizationType[block.name] for block in BLOCK_TYPES.values()}
H, N, K, D, F, L = 256, 4, 2, 64, 512, 2


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch, request):
    """Companion folders of tests are written beside them."""
    if "default_folder" not in request.fixturenames:
        monkeypatch.setenv("LLM_ENGINE_CACHE", str(tmp_path / "cache"))


def blocks(random, rows, columns, kind):
    """Random bytes that are rows of valid blocks: every scale a small float16, everything else anything."""
    size, width = gguf.GGML_QUANT_SIZES[kind]
    raw = random.integers(0, 256, (rows, columns // size, width), dtype=np.uint8)
    halves = {"Q4_0": [0], "Q5_0": [0], "Q8_0": [0], "IQ4_NL": [0], "Q4_1": [0, 2], "Q5_1": [0, 2]}
    halves |= {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q2_K": [80, 82], "Q3_K": [108], "Q6_K": [208]}
    halves |= {"IQ4_XS": [0]}
    for at in halves[kind.name]:
        scale = random.uniform(-0.02, 0.02, raw.shape[:2]).astype("<f2")
        raw[:, :, at : at + 2] = scale[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def encoded(random, rows, columns, kind):
    """A matrix as `kind` stores it: (what the writer wants, the bytes, what it stands for)."""
    if kind.name in ("F32", "F16", "BF16"):
        values = random.standard_normal((rows, columns)).astype(np.float32) * 0.05
        raw = quants.quantize(values, kind)
    else:
        raw = blocks(random, rows, columns, kind)
    return raw, torch.from_numpy(quants.dequantize(raw, kind).astype(np.float32))


def in_halves(stored, heads):
    """What GGUF has as 0, D/2, 1, D/2+1, … in each head, back in order; row by row, on purpose."""
    rows = len(stored)
    size = rows // heads
    out = torch.empty_like(stored)
    for head in range(heads):
        for pair in range(size // 2):
            for member in range(2):
                out[head * size + member * size // 2 + pair] = stored[
                    head * size + 2 * pair + member
                ]
    return out


def write_model(
    path, kinds="F32", *, tied=True, bias=False, arch="llama", pre="smollm", eot=None, fields=(),
    rope=None, extra=(), bos=False, alignment=None, spm=None,
):  # fmt: skip
    """A small Llama; `kinds`: a type, or a dictionary from endings of names to types. Returns its weights by HF name."""
    writer, random, expected = gguf.GGUFWriter(str(path), arch), np.random.default_rng(0), {}
    if alignment:
        writer.add_custom_alignment(alignment)
    tokens = ["<|endoftext|>", "<|im_end|>", "<|eot_id|>", *byte_tokens(), "he", "ll", "hell", "ĠĠ"]
    tokens += [f"<{i}>" for i in range(-len(tokens) % 32)]
    writer.add_context_length(128)
    writer.add_embedding_length(H)
    writer.add_block_count(L)
    writer.add_feed_forward_length(F)
    writer.add_head_count(N)
    writer.add_head_count_kv(K)
    writer.add_rope_dimension_count(D)
    writer.add_rope_freq_base(5e5)
    writer.add_layer_norm_rms_eps(1e-5)
    if spm:
        tokens, scores, types, space = spm
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(types)
        if space is not None:
            writer.add_add_space_prefix(space)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
        writer.add_token_merges(["h e", "l l", "he ll", "Ġ Ġ"])
    writer.add_bos_token_id(1 if spm else 0)
    writer.add_eos_token_id(2 if spm else 1)
    if eot is not None:
        writer.add_eot_token_id(eot)
    if bos is not None:
        writer.add_add_bos_token(bos)
    writer.add_chat_template(TEMPLATE)
    for name, value, kind in fields:  # None: without it
        writer.kv_data[0].pop(name, None)
        if value is not None:
            writer.add_key_value(name, value, kind)

    def add(name, source, rows, columns=None, heads=None):
        if columns is None:
            values = random.standard_normal(rows).astype(np.float32) * 0.1 + ("norm" in name)
            writer.add_tensor(name, values)
            stored = torch.from_numpy(values)
        else:
            found = kinds if isinstance(kinds, str) else "F32"
            if isinstance(kinds, dict):
                found = next((k for end, k in kinds.items() if name.endswith(end)), "F32")
            raw, stored = encoded(random, rows, columns, KINDS[found])
            writer.add_tensor(name, raw, raw_dtype=KINDS[found] if found != "F32" else None)
        expected[source] = in_halves(stored, heads) if heads else stored

    add("token_embd.weight", "model.embed_tokens.weight", len(tokens), H)
    add("output_norm.weight", "model.norm.weight", H)
    if not tied:
        add("output.weight", "lm_head.weight", len(tokens), H)
    if rope is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope, np.float32))
    for i in range(L):
        g, s = f"blk.{i}.", f"model.layers.{i}."
        add(g + "attn_norm.weight", s + "input_layernorm.weight", H)
        add(g + "ffn_norm.weight", s + "post_attention_layernorm.weight", H)
        for letter, heads, rows in (("q", N, N * D), ("k", K, K * D), ("v", None, K * D)):
            add(g + f"attn_{letter}.weight", s + f"self_attn.{letter}_proj.weight", rows, H, heads)
            if bias:
                add(
                    g + f"attn_{letter}.bias",
                    s + f"self_attn.{letter}_proj.bias",
                    rows,
                    None,
                    heads,
                )
        add(g + "attn_output.weight", s + "self_attn.o_proj.weight", H, N * D)
        if bias:
            add(g + "attn_output.bias", s + "self_attn.o_proj.bias", H)
        add(g + "ffn_gate.weight", s + "mlp.gate_proj.weight", F, H)
        add(g + "ffn_up.weight", s + "mlp.up_proj.weight", F, H)
        add(g + "ffn_down.weight", s + "mlp.down_proj.weight", H, F)
    for name in extra:
        writer.add_tensor(name, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, write_model(path)


# --- the header


def test_the_header_is_what_the_gguf_package_reads(tmp_path):
    kinds = gguf.GGUFValueType
    fields = [
        ("test.u8", 200, kinds.UINT8), ("test.i8", -3, kinds.INT8), ("test.u16", 60_000, kinds.UINT16),
        ("test.i16", -300, kinds.INT16), ("test.i32", -70_000, kinds.INT32), ("test.u64", 1 << 40, kinds.UINT64),
        ("test.i64", -(1 << 40), kinds.INT64), ("test.f64", math.pi, kinds.FLOAT64), ("test.f32", 0.1, kinds.FLOAT32),
        ("test.no", False, kinds.BOOL), ("test.text", "naïve 你好", kinds.STRING),
    ]  # fmt: skip
    write_model(tmp_path / "m.gguf", "Q8_0", fields=fields, alignment=128)
    header, reader = read_gguf_header(tmp_path / "m.gguf"), GGUFReader(tmp_path / "m.gguf")
    theirs = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert header.fields == theirs and list(header.fields) == list(theirs)
    assert header.alignment == 128 and header.start == reader.data_offset
    assert [
        (name, list(t.shape), t.kind, t.offset, t.bytes) for name, t in header.tensors.items()
    ] == [
        (t.name, [int(n) for n in reversed(t.shape)], int(t.tensor_type), t.data_offset, t.n_bytes)
        for t in reader.tensors
    ]


def test_lists_in_lists_and_the_older_version_are_read(tmp_path):
    def text(s):
        return struct.pack("<Q", len(s)) + s.encode()

    nested = struct.pack("<IQ", 9, 2) + 2 * struct.pack("<IQ2h", 3, 2, 5, -6)
    page = b"GGUF" + struct.pack("<IQQ", 2, 0, 1) + text("a.b") + struct.pack("<I", 9) + nested
    (tmp_path / "m.gguf").write_bytes(page)
    header = read_gguf_header(tmp_path / "m.gguf")
    assert header.fields == {"a.b": [[5, -6], [5, -6]]} and header.version == 2


def test_sizes_of_blocks_are_those_of_the_gguf_package():
    for number, block in BLOCK_TYPES.items():
        kind = GGMLQuantizationType(number)
        assert (block.name, block.weights, block.bytes) == (kind.name, *gguf.GGML_QUANT_SIZES[kind])


@given(st.integers(0, 5_000), st.integers(0, 255))
def test_a_damaged_header_is_an_error_of_ours_or_still_a_header(tiny, tmp_path_factory, at, byte):
    """Never another exception, never a list of many gigabytes because a length says so."""
    content = bytearray(tiny[0].read_bytes())
    content[at] = byte
    path = tmp_path_factory.mktemp("damaged") / "m.gguf"
    path.write_bytes(content)
    try:
        assert len(read_gguf_header(path).fields) <= 40
    except GGUFError as error:
        assert str(path) in str(error)
    path.unlink()


@given(st.floats(0, 1, exclude_max=True))
def test_a_file_that_was_cut_off_is_noticed_wherever_it_was_cut(tiny, tmp_path_factory, part):
    whole = tiny[0].read_bytes()
    path = tmp_path_factory.mktemp("cut") / "m.gguf"
    path.write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(GGUFError, match=r"[Dd]ownload"):
        read_gguf_header(path)
    path.unlink()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "an empty file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n", "git lfs pull"),
        (b"<html>not found</html>", "text, it begins with '<html>not found"),
        (b"tjgg" + bytes(100), "before GGUF"),
        (b"PK\x03\x04" + bytes(100), "PyTorch pickle"),
        (b'\x40\0\0\0\0\0\0\0{"a": 1}' + bytes(100), "safetensors file under another name"),
        (bytes(100), r"not a GGUF file \(100 bytes\)"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<III", 1, 0, 0) + bytes(9), "GGUF version 1; this engine reads 2 and 3. Look for a newer file"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "version 4.*newer engine"),
        (b"GGUF", "cut off after 4 bytes"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60), "cut off or damaged: it ends inside the header"),
        (b"GGUF" + struct.pack("<IQQQ3sIQ", 3, 0, 1, 3, b"a.b", 8, 99) + b"abc", "99 bytes reaches beyond the end"),
    ],
)  # fmt: skip
def test_what_is_no_gguf_file_is_named(tmp_path, content, says):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(GGUFError, match=f"m.gguf.*(?:{says})"):
        read_gguf_header(tmp_path / "m.gguf")
    with pytest.raises(GGUFError):
        resolve(tmp_path / "m.gguf")
    assert issubclass(GGUFError, WeightsError)


def test_a_type_we_cannot_read_is_named_with_the_way_out(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    raw = np.zeros((2, 66), np.uint8)
    writer.add_tensor("a.weight", raw, raw_dtype=GGMLQuantizationType.IQ2_XXS)
    writer.add_tensor("b.weight", raw, raw_dtype=GGMLQuantizationType.TQ2_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    says = r"m\.gguf: 2 tensors .*\(IQ2_XXS, TQ2_0\), e\.g\. 'a\.weight'.*Q4_K.*llama-quantize"
    with pytest.raises(GGUFError, match=says):
        read_gguf_header(tmp_path / "m.gguf")


# --- the numbers


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_is_unpacked_with_rows_in_order(tmp_path, kind):
    """llama.cpp#13839: rows of q and k lie in another order in GGUF, and whoever forgets it gets fluent nonsense.

    transformers#31788: the keys have heads of their own number, here 2 where the queries have 4.
    """
    expected = write_model(tmp_path / "m.gguf", kind, tied=False, bias=True)
    checkpoint = open_checkpoint(gguf_folder(tmp_path / "m.gguf"))
    assert isinstance(checkpoint, GGUFCheckpoint)
    assert checkpoint.tensors.keys() == expected.keys()
    floats = {"F16": torch.float16, "BF16": torch.bfloat16}
    for name, weight in expected.items():
        got = checkpoint.read(name)
        assert got.dtype == checkpoint.tensors[name].dtype, name
        assert got.dtype == (floats.get(kind, torch.float32) if weight.ndim > 1 else torch.float32)
        assert torch.equal(got.float(), weight), name
        assert got.shape == checkpoint.tensors[name].shape
    header = read_gguf_header(tmp_path / "m.gguf")
    assert checkpoint.bytes == sum(tensor.bytes for tensor in header.tensors.values())


def by_hand(name, b):
    """One block as the sources of ggml describe it, one weight at a time, in double precision."""

    def half(at):
        return struct.unpack_from("<e", b, at)[0]

    if name == "Q8_0":
        return [half(0) * q for q in struct.unpack_from("<32b", b, 2)]
    if name in ("Q4_0", "Q4_1"):
        base = 2 if name == "Q4_0" else 4
        q = [b[base + i] & 15 for i in range(16)] + [b[base + i] >> 4 for i in range(16)]
        return [half(0) * (x - 8) if name == "Q4_0" else half(0) * x + half(2) for x in q]
    if name == "Q5_0":
        (fifth,) = struct.unpack_from("<I", b, 2)
        q = [b[6 + i] & 15 for i in range(16)] + [b[6 + i] >> 4 for i in range(16)]
        return [half(0) * ((x | (fifth >> i & 1) << 4) - 16) for i, x in enumerate(q)]
    if name == "Q4_K":  # 8 groups of 32; 6 bits for each scale and minimum, packed into 12 bytes
        s, out = b[4:16], []
        for g in range(8):
            if g < 4:
                scale, low = s[g] & 63, s[g + 4] & 63
            else:
                scale = s[g + 4] & 15 | (s[g - 4] >> 6) << 4
                low = s[g + 4] >> 4 | (s[g] >> 6) << 4
            for i in range(32):
                q = b[16 + 32 * (g // 2) + i] >> (4 * (g % 2)) & 15
                out.append(half(0) * scale * q - half(2) * low)
        return out
    assert name == "Q6_K"  # 16 groups of 16; 4 low bits, 2 high bits, a signed byte as scale
    out = []
    for i in range(256):
        part, j = divmod(i, 128)
        quarter, k = divmod(j, 32)
        low = b[64 * part + 32 * (quarter % 2) + k] >> (4 * (quarter // 2)) & 15
        high = b[128 + 32 * part + k] >> (2 * quarter) & 3
        (scale,) = struct.unpack_from("<b", b, 192 + i // 16)
        out.append(half(208) * scale * ((low | high << 4) - 32))
    return out


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q6_K"])
def test_blocks_mean_what_the_format_says(tmp_path, kind):
    """ml-explore/mlx#3664 took the header of a Q4_1 block for 2 bytes: each format decoded anew, from its description."""
    write_model(tmp_path / "m.gguf", {"ffn_down.weight": kind})
    checkpoint = open_checkpoint(gguf_folder(tmp_path / "m.gguf"))
    name = "model.layers.1.mlp.down_proj.weight"
    raw, block = checkpoint.raw(name), checkpoint.block(name)
    got = checkpoint.read(name)[3]
    for i in range(F // block.weights):
        piece = bytes(raw[3, i * block.bytes : (i + 1) * block.bytes].tolist())
        wanted = torch.tensor(by_hand(kind, piece), dtype=torch.float64)
        part = got[i * block.weights : (i + 1) * block.weights].double()
        assert torch.allclose(part, wanted, rtol=1e-5, atol=1e-7)


def test_the_default_model_read_directly_is_the_converted_one(default_folder):
    folder = resolve(gguf_file())
    assert folder != default_folder
    ours, theirs = open_checkpoint(folder), open_checkpoint(default_folder)
    assert isinstance(ours, GGUFCheckpoint) and not isinstance(theirs, GGUFCheckpoint)
    assert list(ours.tensors) == list(theirs.tensors) and len(ours.tensors) == 272
    for name, info in theirs.tensors.items():
        assert ours.tensors[name][:2] == info[:2]
        assert torch.equal(ours.read(name), theirs.read(name)), name
    assert load_config(folder) == load_config(default_folder)
    mine, other = Tokenizer.from_folder(folder), Tokenizer.from_folder(default_folder)
    assert [mine.encode(text) for text in TEXTS] == [other.encode(text) for text in TEXTS]
    chat = [{"role": "user", "content": "Hi"}]
    assert mine.apply_chat_template(chat) == other.apply_chat_template(chat)


# --- folders


def test_a_file_becomes_a_folder_once_and_again_when_it_changes(tmp_path):
    path = tmp_path / "My.Model.GGUF"
    write_model(path)
    folder = resolve(str(path))
    assert folder.parent.parent == tmp_path / "cache" and folder.name.startswith("My.Model-")
    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert not any(p.stat().st_size > 100_000 for p in folder.iterdir()), "no copy of the weights"
    assert resolve(path) == folder
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == before
    write_model(path, "Q8_0")
    with pytest.raises(GGUFError, match="has changed since"):
        open_checkpoint(folder)
    assert resolve(path) != folder
    path.unlink()
    with pytest.raises(GGUFError, match="has gone since"):
        open_checkpoint(folder)


def test_a_folder_with_a_gguf_file_beside_its_config(tmp_path):
    expected = write_model(tmp_path / "m.gguf", "Q8_0")
    (tmp_path / "model").mkdir()
    for page in gguf_folder(tmp_path / "m.gguf").iterdir():
        if page.name != "gguf.json":
            (tmp_path / "model" / page.name).write_bytes(page.read_bytes())
    (tmp_path / "m.gguf").rename(tmp_path / "model" / "m.gguf")
    checkpoint = open_checkpoint(tmp_path / "model")
    name = "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(checkpoint.read(name), expected[name])
    load_model(tmp_path / "model")
    (tmp_path / "model" / "other.gguf").write_bytes(b"")
    with pytest.raises(GGUFError, match=r"2 GGUF files \(m\.gguf, other\.gguf\): name the one"):
        open_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    assert not GGUFCheckpoint.recognizes(tmp_path / "model"), "safetensors come first"


U32 = gguf.GGUFValueType.UINT32
DAMAGED = [
    (("llama.attention.head_count", 0, U32), "llama.attention.head_count.*: 0"),
    (("llama.attention.head_count", None, None), "llama.attention.head_count.*None"),
    (("llama.attention.head_count_kv", 0, U32), "llama.attention.head_count_kv.*: 0"),
    (("llama.embedding_length", None, None), "llama.embedding_length"),
    (("llama.block_count", "two", gguf.GGUFValueType.STRING), "llama.block_count.*'two'"),
    (("llama.attention.layer_norm_rms_epsilon", None, None), "layer_norm_rms_epsilon"),
    (("tokenizer.ggml.tokens", None, None), "tokenizer.ggml.tokens"),
    (("tokenizer.ggml.token_type", None, None), "tokenizer.ggml.token_type"),
    (("tokenizer.ggml.merges", None, None), "tokenizer.ggml.merges"),
    (("tokenizer.ggml.eos_token_id", 100_000, U32), "tokenizer.ggml.eos_token_id.*100000"),
]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"arch": "qwen2"}, "architecture 'qwen2'"),
        ({"pre": "my-own"}, "pre-tokenizer 'my-own'; only byte-level BPE"),
        ({"extra": ["blk.0.ffn_gate_exps.weight"]}, "'blk.0.ffn_gate_exps.weight' is not known"),
        ({"fields": [("split.count", 3, gguf.GGUFValueType.UINT16)]}, "one of 3 parts.*gguf-split --merge"),
        ({"fields": [("llama.rope.scaling.type", "yarn", gguf.GGUFValueType.STRING)]}, "scaled by 'yarn'"),
        *(({"fields": [field]}, says) for field, says in DAMAGED),
        ({"rope": [1.0, 2.0]}, "do not go together"),
        ({"rope": [2.0] * 16 + [1.0] * 16}, "not those of Llama 3"),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded_is_named(tmp_path, options, says):
    write_model(tmp_path / "m.gguf", **options)
    with pytest.raises((GGUFError, HubError), match=f"m.gguf.*{says}"):
        open_checkpoint(resolve(tmp_path / "m.gguf"))


# --- positions


def llama3_factors(theta, D, factor, low, high, context):
    """As llama.cpp's converter computes them, one pair at a time."""
    out = []
    for pair in range(D // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / D)
        if wavelength < context / high:
            out.append(1.0)
        elif wavelength > context / low:
            out.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(out, dtype=torch.float32)


def test_llama_3_2_is_recovered_from_its_factors():
    factors = llama3_factors(5e5, 64, 32.0, 1.0, 4.0, 8192)
    assert rope_from_factors(factors, 5e5) == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert rope_from_factors(torch.ones(32), 5e5) is None


@given(
    st.sampled_from([1e4, 1e5, 5e5]),
    st.sampled_from([64, 128]),
    st.floats(1.5, 64),
    st.floats(0.5, 2),
    st.floats(2, 8),
    st.sampled_from([1024, 4096, 8192]),
)
def test_recovered_scaling_turns_as_fast(theta, D, factor, low, ratio, context):
    factors = llama3_factors(theta, D, factor, low, low * ratio, context)
    try:
        made = rope_from_factors(factors, theta)
    except GGUFError:
        keep = (1 / factors - 1 / factors.max()) / (1 - 1 / factors.max())
        assert int(((keep > 1e-4) & (keep < 1 - 1e-4)).sum()) < 2, "two points make a line"
        return
    wanted = base_frequencies(theta, D) / factors
    got, _ = llama3_frequencies(RopeConfig(rope_theta=theta, **made), D, 131072)
    assert torch.allclose(got, wanted, rtol=3e-5)


def test_scaled_positions_arrive_in_the_config(tmp_path):
    factors = llama3_factors(5e5, D, 32.0, 1.0, 4.0, 8192)
    write_model(tmp_path / "m.gguf", rope=factors)
    folder = resolve(tmp_path / "m.gguf")
    rope = load_config(folder).rope
    assert (rope.rope_type, rope.factor, rope.original_max_position_embeddings) == (
        "llama3",
        32.0,
        8192,
    )
    assert "rope_freqs.weight" not in open_checkpoint(folder).tensors
    kinds = gguf.GGUFValueType
    fields = [
        ("llama.rope.scaling.type", "linear", kinds.STRING),
        ("llama.rope.scaling.factor", 4.0, kinds.FLOAT32),
    ]
    write_model(tmp_path / "l.gguf", fields=fields)
    rope = load_config(resolve(tmp_path / "l.gguf")).rope
    assert (rope.rope_type, rope.factor) == ("linear", 4.0)
    for old, wanted in ((8.0, ("linear", 8.0)), (1.0, ("default", None))):  # the older name
        write_model(
            tmp_path / f"o{old}.gguf", fields=[("llama.rope.scale_linear", old, kinds.FLOAT32)]
        )
        rope = load_config(resolve(tmp_path / f"o{old}.gguf")).rope
        assert (rope.rope_type, rope.factor) == wanted


# --- text


def test_llama_3_cuts_numbers_into_threes_and_begins_with_bos(tmp_path):
    write_model(tmp_path / "m.gguf", pre="llama-bpe", bos=None, eot=2)
    tokenizer = Tokenizer.from_folder(resolve(tmp_path / "m.gguf"))
    assert tokenizer.encode("hell")[0] == tokenizer.bos_id == 0
    assert tokenizer.eos_ids == (1, 2), "an answer ends with <|eot_id|>, a text with its own token"
    backend = json.loads((resolve(tmp_path / "m.gguf") / "tokenizer.json").read_text())
    assert backend["model"]["ignore_merges"] is True
    from tokenizers import Tokenizer as Backend

    cut = Backend.from_str(json.dumps(backend)).pre_tokenizer.pre_tokenize_str
    pieces = [
        piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in cut("I'LL pay 12345!!\n\n  ok")
    ]
    assert pieces == ["I", "'LL", " pay", " ", "123", "45", "!!\n\n", " ", " ok"]


@pytest.mark.parametrize("space", [None, False])
def test_a_sentencepiece_vocabulary_reads_as_the_library_that_made_it(tmp_path, space):
    import io

    import sentencepiece

    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=made, vocab_size=352, model_type="bpe", byte_fallback=True,
        character_coverage=0.98, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
        add_dummy_prefix=space is None,
    )  # fmt: skip
    library = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
    tokens = [library.id_to_piece(i) for i in range(len(library))]
    scores = [library.get_score(i) for i in range(len(library))]
    types = [
        2
        if library.is_unknown(i)
        else 3
        if library.is_control(i)
        else 6
        if library.is_byte(i)
        else 1
        for i in range(len(library))
    ]
    write_model(tmp_path / "m.gguf", spm=(tokens, scores, types, space), bos=None)
    tokenizer = Tokenizer.from_folder(resolve(tmp_path / "m.gguf"))
    for text in [*PROMPTS, *TEXTS, "  two\n\n  spaces "]:
        if "<|" not in text:
            assert tokenizer.encode(text, add_bos=False) == library.encode(text), text
            assert tokenizer.decode(library.encode(text)) == library.decode(library.encode(text))
    assert tokenizer.encode("the cat")[0] == tokenizer.bos_id == 1, (
        "begins with BOS, where nothing is said"
    )
    assert tokenizer.vocab_size == 352
    load_model(resolve(tmp_path / "m.gguf"))


# --- blocks that stay


def layers_of(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, (QuantizedLinear, torch.nn.Linear))}  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [*STORED_SCHEMES])
def test_stored_blocks_are_the_weights_bit_for_bit(tmp_path, kind, tied):
    write_model(tmp_path / "m.gguf", kind, tied=tied, bias=True)
    folder = resolve(tmp_path / "m.gguf")
    stored, plain = load_model(folder, quantize="stored"), load_model(folder)
    for name, module in layers_of(stored).items():
        if name.startswith("embed."):
            continue
        assert type(module) is QuantizedLinear and module.scheme == STORED_SCHEMES[kind], name
        other = plain.get_submodule(name)
        assert torch.equal(module.weight, other.weight), name
        assert (module.bias is None) == (other.bias is None)
        assert module.bias is None or torch.equal(module.bias, other.bias)
    assert isinstance(stored.embed, QuantizedEmbedding)
    assert torch.equal(stored.embed.weight, plain.embed.weight)
    assert (stored.embed.head is stored.lm_head) is tied
    checkpoint = open_checkpoint(folder)
    assert sum(p.nbytes for p in stored.parameters()) == checkpoint.bytes, "not a byte more"
    assert checkpoint.stored_bytes(plain, torch.float32) == checkpoint.bytes
    assert not any(p.is_meta or p.requires_grad for p in stored.parameters())
    assert stored.to(torch.bfloat16).layers[0].ffn.up_proj.scale.dtype == torch.float16


def test_a_matrix_that_is_changed_on_its_way_cannot_stay_in_its_blocks(tmp_path, monkeypatch):
    """An architecture whose rules turn a matrix around, or scale it: its blocks are not what the model wants."""
    write_model(tmp_path / "m.gguf", "Q8_0")
    folder = resolve(tmp_path / "m.gguf")
    plain = load_model(folder)
    rules = [
        rule._replace(change=lambda weight, config: weight * 2) if "self_attn" in rule.source else rule
        for rule in NAME_RULES["llama"]
    ]  # fmt: skip
    monkeypatch.setitem(NAME_RULES, "llama", NameRules(rules))
    stored = load_model(folder, quantize="stored")
    for one, other in zip(stored.layers, plain.layers, strict=True):
        assert type(one.attn.v_proj) is torch.nn.Linear and type(one.ffn.up_proj) is QuantizedLinear
        assert torch.equal(one.attn.v_proj.weight, 2 * other.attn.v_proj.weight)
        assert torch.equal(one.ffn.up_proj.weight, other.ffn.up_proj.weight)


def test_mixed_files_keep_what_they_can(tmp_path):
    """As a Q4_K_M file is: several types in one. What has no counterpart is unpacked, in the dtype asked for."""
    kinds = {"attn_v.weight": "Q6_K", "ffn_down.weight": "Q4_K", "token_embd.weight": "F16"}
    kinds |= {"attn_q.weight": "Q4_0", "ffn_up.weight": "Q8_0", "attn_k.weight": "Q4_1"}
    write_model(tmp_path / "m.gguf", kinds)
    folder = resolve(tmp_path / "m.gguf")
    model = load_model(folder, quantize="stored", dtype=torch.bfloat16)
    plain = load_model(folder)
    found = {
        name: m.scheme.name for name, m in layers_of(model).items() if type(m) is QuantizedLinear
    }
    assert {name.split(".", 2)[2]: scheme for name, scheme in found.items()} == {
        "attn.q_proj": "int4-g32",
        "attn.k_proj": "int4-g32-asym",
        "ffn.up_proj": "int8-g32",
    }
    assert len(found) == 3 * L
    assert model.layers[0].attn.v_proj.weight.dtype == torch.bfloat16
    assert model.lm_head.weight is model.embed.weight
    taken = sum(p.nbytes for p in model.parameters())
    assert open_checkpoint(folder).stored_bytes(plain, torch.bfloat16) == taken
    for name, module in layers_of(model).items():
        wanted = plain.get_submodule(name).weight
        got = module.weight.float()
        assert torch.equal(got, wanted if name in found else wanted.to(torch.bfloat16).float()), (
            name
        )


def test_stored_and_unpacked_give_the_same_logits(tmp_path):
    write_model(tmp_path / "m.gguf", "Q4_0", fields=[])
    one = Engine.from_pretrained(
        tmp_path / "m.gguf", quantize="stored", runner="torch", dtype="float32"
    )
    two = Engine.from_pretrained(tmp_path / "m.gguf", runner="torch", dtype="float32")
    ids = [5, 17, 200, 3, 99]
    assert torch.allclose(one.logits(ids), two.logits(ids), atol=1e-4)


def test_stored_refuses_other_files_and_faults_before_anything_is_changed(tmp_path, default_folder):
    with pytest.raises(GGUFError, match=r"blocks of a GGUF file.*gguf_file\(\)"):
        load_model(default_folder, quantize="stored")
    write_model(tmp_path / "m.gguf", "Q8_0")
    folder = resolve(tmp_path / "m.gguf")
    page = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(page | {"num_hidden_layers": 3}))
    with pytest.raises(WeightsError, match=r"9 problems(?s:.*)missing +layers\.2\.attn"):
        load_model(folder, quantize="stored")


def test_a_tied_config_with_two_tables_is_checked(tmp_path):
    write_model(tmp_path / "m.gguf", "Q8_0", tied=False)
    folder = resolve(tmp_path / "m.gguf")
    page = json.loads((folder / "config.json").read_text())
    assert page["tie_word_embeddings"] is False
    (folder / "config.json").write_text(json.dumps(page | {"tie_word_embeddings": True}))
    with pytest.raises(WeightsError, match="tie_word_embeddings.*differ"):
        load_model(folder, quantize="stored")


def test_a_quantized_gguf_model_stands_alone(tmp_path):
    """What is written has its own weights: it loads when the GGUF file is gone."""
    write_model(tmp_path / "m.gguf", "Q8_0")
    source = resolve(tmp_path / "m.gguf")
    model = load_model(source, quantize="int8-rtn")
    written = save_quantized(model, tmp_path / "q", source, "int8-rtn")
    assert not (written / "gguf.json").exists()
    (tmp_path / "m.gguf").unlink()
    for _ in range(2):
        assert type(open_checkpoint(written)) is QuantizedCheckpoint
        again = dict(load_model(resolve(written)).named_parameters())
        assert all(torch.equal(w, again[n]) for n, w in model.named_parameters())
        (written / "gguf.json").write_text("{}", "utf8")  # one that was copied before


def test_the_plan_of_a_gguf_file_offers_its_blocks(tmp_path, default_folder):
    question = {"context": 100, "device": "cpu", "runner": "torch"}
    made = plan(gguf_file(), memory="700MB", **question)
    assert [n.name for n in made.needs] == ["float32", "as stored", "bfloat16", "int8", "int4"]
    assert made.needs[1].weights == 96_576_768 and made.fits(made.needs[0]) == "no"
    assert made.advice == ("The most precise that fits: as stored (--quantize stored).",)
    write_model(tmp_path / "m.gguf", "Q4_0")  # smaller than int4, whose head has 8 bits
    for file, least in ((gguf_file(), "int4"), (tmp_path / "m.gguf", "as stored")):
        made = plan(file, memory="100MB", **question)
        assert least == min(made.needs, key=lambda need: need.weights).name
        assert made.advice[0].startswith(f"{least} needs ")


def test_the_default_model_runs_in_the_blocks_it_came_in(default_folder):
    engine = Engine.from_pretrained(gguf_file(), quantize="stored", runner="torch", dtype="float32")
    assert sum(p.nbytes for p in engine.model.parameters()) == 96_576_768
    done = engine.generate("The capital of France is", SamplingParams(max_new_tokens=2))
    assert done.text.startswith(" Paris.")


def test_a_folder_with_nothing_but_one_gguf_file_is_a_model(tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(HubError, match=r"without config.json: is it a model folder\?"):
        resolve(tmp_path / "mine")
    write_model(tmp_path / "mine" / "m.gguf")
    assert resolve(tmp_path / "mine") == resolve(tmp_path / "mine" / "m.gguf")
    (tmp_path / "mine" / "n.gguf").write_bytes(b"")
    with pytest.raises(HubError, match="with 2 model files: name the one you want"):
        resolve(tmp_path / "mine")
