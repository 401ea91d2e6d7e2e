"""Chapter 11: config.json in all its spellings, and what is said when it cannot be used."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_engine.config import (
    CONFIG_READERS,
    ConfigError,
    ModelConfig,
    Registry,
    head_size,
    load_config,
    read_eos,
    read_llama,
    read_rope,
)

LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA_1B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "llama3", **LLAMA3},
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}


def write(folder, config, generation=None):
    (folder / "config.json").write_text(json.dumps(config), "utf8")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation), "utf8")
    return folder


def test_every_field_of_llama_3_2_arrives(tmp_path):
    generation = {"eos_token_id": [128001, 128008, 128009], "temperature": 0.6}
    config = load_config(write(tmp_path, LLAMA_1B, generation))
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (128256, 2048, 8192)
    assert (config.num_hidden_layers, config.num_attention_heads) == (16, 32)
    assert (config.num_key_value_heads, config.head_dim) == (8, 64)
    assert (config.max_position_embeddings, config.rms_norm_eps) == (131072, 1e-5)
    assert (config.hidden_act, config.attention_bias, config.mlp_bias) == ("silu", False, False)
    assert config.tie_word_embeddings is True
    assert config.rope.rope_type == "llama3" and config.rope.rope_theta == 500000.0
    assert {k: getattr(config.rope, k) for k in LLAMA3} == LLAMA3
    assert (config.bos_token_id, config.eos_token_ids) == (128000, (128001, 128008, 128009))
    assert config.dtype == "bfloat16" and config.generation["temperature"] == 0.6


def test_the_reading_agrees_with_transformers():
    from transformers import LlamaConfig

    older = {k: v for k, v in LLAMA_1B.items() if k not in ("head_dim", "rope_scaling")}
    pages = [
        LLAMA_1B,
        {**older, "head_dim": None},
        {**older, "head_dim": 128},
        {**older, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {**older, "rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 4.0}},
        {**older, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {**older, "rope_parameters": {"rope_type": "default"}},
        {**older, "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16}},
    ]
    for page in pages:
        ours = read_llama(page)
        theirs = LlamaConfig(**json.loads(json.dumps(page)))
        assert ours.head_dim == theirs.head_dim
        for key, value in theirs.rope_parameters.items():
            if key == "original_max_position_embeddings" and getattr(ours.rope, key) is None:
                assert value == ours.max_position_embeddings  # what absence means
            elif key != "type":
                assert getattr(ours.rope, key) == value, (page, key)


@pytest.mark.parametrize(
    "page",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": None, "rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 500000, "rope_parameters": {"rope_type": "llama3", **LLAMA3}},
        {"rope_scaling": None, "rope_parameters": {"type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ],
)
def test_every_spelling_of_llama3_scaling_is_read(page):
    """lablup/mlxcel#1355: only `type` was read, `rope_type` was not, and Llama 3.2 ran unscaled without a word."""
    rope = read_rope(page)
    assert (rope.rope_type, rope.rope_theta) == ("llama3", 5e5)
    assert {k: getattr(rope, k) for k in LLAMA3} == LLAMA3


def test_rope_defaults_and_nulls():
    assert read_rope({}).rope_type == "default" and read_rope({}).rope_theta == 10_000.0
    yarn = {"rope_type": "yarn", "factor": 4, "beta_fast": None, "truncate": False}
    assert read_rope({"rope_scaling": yarn}).beta_fast == 32.0
    assert read_rope({"rope_scaling": yarn}).truncate is False
    assert read_rope({"partial_rotary_factor": 0.25}).partial_rotary_factor == 0.25


@pytest.mark.parametrize(
    ("rope", "says"),
    [
        (
            {"rope_type": "spiral"},
            "unknown rope_type 'spiral'. Known: default, dynamic, linear, llama3, yarn",
        ),
        ({"type": "linear"}, "needs factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "needs low_freq_factor and high_freq_factor"),
        ({"rope_type": "linear", "factor": "8"}, "'factor' must be a number"),
        (
            {"sliding_attention": {"rope_type": "default"}, "full_attention": None},
            "each kind of layer",
        ),
    ],
)
def test_a_rope_we_cannot_do_is_refused(rope, says):
    with pytest.raises(ConfigError, match=says):
        read_rope({"rope_parameters": rope})


def test_a_stated_head_dim_wins():
    """paiml/entrenar#262: Qwen3-4B has H 2560, N 32, D 128, so q_proj is [4096, 2560], not [2560, 2560]."""
    config = read_llama(
        {**LLAMA_1B, "hidden_size": 2560, "num_attention_heads": 32, "head_dim": 128}
    )
    assert (config.num_attention_heads * config.head_dim, config.hidden_size) == (4096, 2560)

    import torch

    from llm_engine.attention import Attention

    with torch.device("meta"):
        attention = Attention(config, 0)
    assert tuple(attention.q_proj.weight.shape) == (4096, 2560)
    assert tuple(attention.o_proj.weight.shape) == (2560, 4096)


def test_head_dim_absent_or_null_is_computed():
    page = {"hidden_size": 576, "num_attention_heads": 9}
    assert head_size(page) == head_size({**page, "head_dim": None}) == 64
    with pytest.raises(ConfigError, match=r"hidden_size \(H = 576\).*\(N = 7\).*state head_dim"):
        head_size({**page, "num_attention_heads": 7})
    with pytest.raises(ConfigError, match="N = 0"):
        head_size({**page, "num_attention_heads": 0})


ids = st.none() | st.integers(0, 50) | st.lists(st.integers(0, 50), max_size=5)


@given(ids, ids)
def test_eos_is_the_union_in_order_each_once(first, second):
    def flat(x):
        return [] if x is None else x if isinstance(x, list) else [x]

    pages = [{} if x is None else {"eos_token_id": x} for x in (first, second)]
    got = read_eos(*pages)
    assert set(got) == {*flat(first), *flat(second)}
    assert len(set(got)) == len(got)
    assert list(got) == sorted(got, key=(flat(first) + flat(second)).index)


@pytest.mark.parametrize("wrong", ["2", 2.0, [2, "3"], True, {"id": 2}])
def test_eos_of_another_type_is_refused(wrong):
    with pytest.raises(ConfigError, match="eos_token_id"):
        read_eos({"eos_token_id": wrong}, {})


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"]
)
@pytest.mark.parametrize("value", [None, "12", 1.5, True, 0, -3])
def test_sizes_must_be_whole_and_positive(tmp_path, key, value):
    write(tmp_path, {**LLAMA_1B, key: value})
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value) and key in str(error.value)


def test_the_optional_keys_have_the_references_defaults():
    required = ["model_type", "vocab_size", "hidden_size", "intermediate_size"]
    required += ["num_hidden_layers", "num_attention_heads", "max_position_embeddings"]
    config = read_llama({key: LLAMA_1B[key] for key in required})
    assert config.num_key_value_heads == config.num_attention_heads == 32
    assert (config.head_dim, config.rms_norm_eps, config.hidden_act) == (64, 1e-6, "silu")
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False,) * 3
    assert (config.eos_token_ids, config.bos_token_id, config.dtype) == ((), None, "float32")


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_under_both_names(key):
    page = {k: v for k, v in LLAMA_1B.items() if k != "torch_dtype"}
    assert read_llama({**page, key: "float16"}).dtype == "float16"
    assert read_llama({**page, key: "torch.bfloat16"}).dtype == "bfloat16"


def test_key_value_heads_must_share_evenly(tmp_path):
    write(tmp_path, {**LLAMA_1B, "num_key_value_heads": 5})
    with pytest.raises(ConfigError, match=r"N = 32.*not a multiple.*K = 5"):
        load_config(tmp_path)


def test_an_unknown_model_type_names_the_known_ones(tmp_path):
    write(tmp_path, {**LLAMA_1B, "model_type": "mamba"})
    with pytest.raises(
        ConfigError, match=r"config.json: unknown model type 'mamba'. Known: .*llama"
    ):
        load_config(tmp_path)
    write(tmp_path, {k: v for k, v in LLAMA_1B.items() if k != "model_type"})
    with pytest.raises(ConfigError, match="'model_type' is missing"):
        load_config(tmp_path)


def test_wrong_folders(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        load_config(tmp_path / "nowhere")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="a file; a model is a folder"):
        load_config(file)
    with pytest.raises(ConfigError, match=r"no config\.json here"):
        load_config(tmp_path)
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(ConfigError, match="Meta's own layout"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"a": 1,', "not valid JSON.*line 1"),
        (b"", "not valid JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n", "git lfs pull"),
        (b"[1, 2]", "expected a JSON object .* found a list"),
        (b"\xff\xfe\x00\x01", "not a text file"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_pages_that_are_not_json(tmp_path, name, content, says):
    write(tmp_path, LLAMA_1B)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=says) as error:
        load_config(tmp_path)
    assert name in str(error.value)


def test_a_byte_order_mark_does_no_harm(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_1B), "utf-8-sig")
    assert load_config(tmp_path).vocab_size == 128256


def test_an_unknown_activation_is_refused_when_the_model_is_built():
    import torch

    from llm_engine.transformer import Transformer

    config = read_llama({**LLAMA_1B, "hidden_act": "sine", "num_hidden_layers": 1})
    with (
        torch.device("meta"),
        pytest.raises(ConfigError, match=r"activation 'sine'. Known: .*silu"),
    ):
        Transformer(config)


def test_parameters_of_llama_1b_by_formula():
    import torch

    from llm_engine.transformer import Transformer

    with torch.device("meta"):
        model = Transformer(read_llama(LLAMA_1B))
    assert sum(p.numel() for p in model.parameters()) == 1_235_814_400


def test_the_default_model(default_folder):
    config = load_config(default_folder)
    assert isinstance(config, ModelConfig)
    sizes = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    assert sizes == (576, 9, 3) and (config.num_hidden_layers, config.vocab_size) == (30, 49152)
    assert config.rope.rope_theta == 1e5 and config.rms_norm_eps == 1e-5
    assert config.eos_token_ids == (2,) and config.tie_word_embeddings


def test_registry():
    table = Registry("part")
    with pytest.raises(ValueError, match="unknown part 'x'. Known: none"):
        table["x"]
    table.register("first")(1)
    table.register("second")(2)
    assert table.default == "first"
    table.register("third", default=True)(3)
    assert table.default == "third" and table["second"] == 2
    with pytest.raises(ConfigError, match="Known: first, second, third"):
        table["x"]
    assert "llama" in CONFIG_READERS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": ["llama"]}, "'model_type' must be a name"),
        ({"hidden_size": float("inf")}, "'hidden_size' must be a whole number"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' must be a number"),
        ({"rope_scaling": "llama3"}, "rope_scaling should be a set of named numbers"),
        ({"rope_scaling": {"rope_type": ["llama3"]}}, "unknown rope_type"),
        ({"rope_scaling": {"full": {"rope_type": "default"}}}, "for each kind of layer"),
    ],
)
def test_values_of_the_wrong_kind_are_named(tmp_path, change, message):
    """JSON as Python reads it may hold NaN, Infinity, and a list where a name belongs."""
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, LLAMA_1B | change))
