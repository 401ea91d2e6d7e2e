"""The fast runners against the plain one: same logits, same tokens, same caches; and how one of them is chosen."""

import logging
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llm_engine.attention import CACHES, Batch, single
from llm_engine.config import ModelConfig, RopeConfig
from llm_engine.engine import Engine
from llm_engine.graph_runner import GraphRunner, capture
from llm_engine.kv_cache import CacheError
from llm_engine.numba_runner import NumbaRunner, why_not
from llm_engine.sampler import SamplingParams
from llm_engine.trace import Trace
from llm_engine.transformer import RUNNERS, Block, TorchRunner, Transformer
from llm_engine.verify import side_by_side

VARIANTS = {
    "gqa": {},
    "mha": {"num_key_value_heads": 6},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "odd sizes": {"hidden_size": 35, "intermediate_size": 53, "vocab_size": 101, "head_dim": 14},
    "partial rotary": {"rope": RopeConfig(partial_rotary_factor=0.5)},
    "linear": {"rope": RopeConfig("linear", factor=4.0)},
    "yarn": {
        "rope": RopeConfig("yarn", factor=4.0, original_max_position_embeddings=32),
        "head_dim": 16,
    },
    "dynamic": {
        "rope": RopeConfig("dynamic", factor=2.0),
        "max_position_embeddings": 128,
    },
    "large epsilon": {"rms_norm_eps": 0.3},
    "one layer": {"num_hidden_layers": 1},
}


def make(seed=0, **changes):
    config = ModelConfig(
        **{
            "model_type": "llama",
            "vocab_size": 99,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 128,
            **changes,
        }
    )
    return Transformer(config).reset(seed).eval().requires_grad_(False)


def new_cache(model, rows=1, name="growing", dtype=None):
    return CACHES[name](model.config, rows, "cpu", dtype or model.embed.weight.dtype)


def by_hand(step):
    """Stands in for a CUDA graph: the step is run again at each replay, from the same inputs, into the same result."""
    result = step()
    return lambda: result.copy_(step()), result


def runners(model):
    return {
        "numba": NumbaRunner(model),
        "prefill": NumbaRunner(model, max_rows=0),
        "graph": GraphRunner(model, max_tokens=200, record=by_hand),
    }


def feed(runner, model, ids, sizes, cache=None):
    """Logits at every position, fed in pieces of the given sizes."""
    cache = cache or new_cache(model)
    logits, at = [], int(cache.seen[0])
    for size in sizes:
        rows = torch.arange(size)[None]
        logits.append(runner.logits(single(ids[at : at + size], at), cache, rows)[0])
        cache.commit()
        at += size
    return torch.cat(logits)


IDS = torch.randint(3, 99, (40,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("kind", ["numba", "prefill", "graph"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_every_variant(variant, kind):
    model = make(len(variant), **VARIANTS[variant])
    wanted = feed(TorchRunner(model), model, IDS, [40])
    runner = runners(model)[kind]
    found = feed(runner, model, IDS, [1, 3, 8, 20, 1, 7])
    torch.testing.assert_close(found, wanted)
    assert runner.positions_computed == 40 and runner.torch.positions_computed == 0


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8))
def test_any_split_gives_the_same_logits(sizes):
    model = MODEL
    ids = (IDS * 3)[: sum(sizes)]
    wanted = feed(TorchRunner(model), model, ids, [len(ids)])
    torch.testing.assert_close(feed(NumbaRunner(model), model, ids, sizes), wanted)


MODEL = make()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", ["growing", "static"])
def test_threads_and_caches(threads, name):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        wanted = feed(TorchRunner(MODEL), MODEL, IDS, [40])
        cache = new_cache(MODEL, name=name)
        found = feed(NumbaRunner(MODEL), MODEL, IDS, [30, *[1] * 10], cache)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("kind", ["numba", "prefill", "graph"])
def test_the_cache_holds_what_torch_would_have_put_there(kind):
    caches = [new_cache(MODEL), new_cache(MODEL)]
    feed(TorchRunner(MODEL), MODEL, IDS, [12, 1, 1], caches[0])
    feed(runners(MODEL)[kind], MODEL, IDS, [12, 1, 1], caches[1])
    for part in ("keys", "values"):
        a, b = (getattr(cache, part)[:, :, :, :14] for cache in caches)
        torch.testing.assert_close(a, b)
    assert torch.equal(caches[0].pos, caches[1].pos) and torch.equal(caches[0].seen, caches[1].seen)


@pytest.mark.parametrize("kind", ["numba", "prefill", "graph"])
def test_ragged_rows_give_what_each_gives_alone(kind):
    rows = [IDS[:2], IDS[5:12], IDS[20:24]]
    runner, cache = runners(MODEL)[kind], new_cache(MODEL, rows=3)
    batch = side_by_side(rows)
    last = torch.tensor([[len(row) - 1] for row in rows])
    first = runner.logits(batch, cache, last)
    assert runner.positions_computed == 2 + 7 + 4, "padding is not counted"
    cache.commit()
    next_ids = torch.tensor([[7], [8], [9]])
    second = runner.logits(Batch(next_ids, cache.seen[:, None].clone()), cache, last * 0)
    for row, ids in enumerate(rows):
        alone = feed(TorchRunner(MODEL), MODEL, [*ids, 7 + row], [len(ids) + 1])
        torch.testing.assert_close(first[row, 0], alone[-2])
        torch.testing.assert_close(second[row, 0], alone[-1])


def test_a_tree_of_drafts():
    """Two branches from one root: each node sees its own ancestors only."""
    ids, tree = [5, 6, 7, 8, 9], torch.eye(5, dtype=torch.bool)
    for child, parents in {1: [0], 2: [0, 1], 3: [0], 4: [0, 3]}.items():
        tree[child, parents] = True
    pos = torch.tensor([[10, 11, 12, 11, 12]])
    for runner in (NumbaRunner(MODEL), NumbaRunner(MODEL, max_rows=0)):
        cache = new_cache(MODEL)
        feed(runner, MODEL, IDS, [10], cache)
        found = runner.logits(
            Batch(torch.tensor([ids]), pos, tree[None]), cache, torch.arange(5)[None]
        )
        for branch in ([0, 1, 2], [0, 3, 4]):
            alone = feed(TorchRunner(MODEL), MODEL, [*IDS[:10], *(ids[i] for i in branch)], [13])[
                10:
            ]
            torch.testing.assert_close(found[0, branch], alone)


@pytest.mark.parametrize("kind", ["numba", "prefill"])
def test_windows_and_sinks_come_from_the_mask(kind):
    model = make()
    for layer in model.layers:
        layer.attn.window, layer.attn.sinks = 5, 2
    wanted = feed(TorchRunner(model), model, IDS, [40])
    torch.testing.assert_close(feed(runners(model)[kind], model, IDS, [10, *[1] * 30]), wanted)


def test_bfloat16_is_as_near_to_float32_as_torch_is():
    model = make()
    exact = feed(TorchRunner(model), model, IDS, [40])
    rounded = make().bfloat16()
    torchs = (feed(TorchRunner(rounded), rounded, IDS, [40]) - exact).abs().mean()
    for runner in (NumbaRunner(rounded), NumbaRunner(rounded, max_rows=0)):
        ours = (feed(runner, rounded, IDS, [9, *[1] * 31]) - exact).abs().mean()
        assert ours < torchs, "activations stay in float32, so less is lost"


def test_rows_asked_for():
    runner, wanted = NumbaRunner(MODEL), feed(TorchRunner(MODEL), MODEL, IDS, [6])
    for rows in ([5], [0, 3], [4, 4, 1], list(range(6)) * 2, []):
        found = runner.logits(single(IDS[:6]), new_cache(MODEL), torch.tensor([rows]).long())
        torch.testing.assert_close(found[0], wanted[rows])
    with pytest.raises(ValueError, match="rows must lie in"):
        runner.logits(single(IDS[:6]), new_cache(MODEL), torch.tensor([[6]]))


def test_caches_without_slots_and_hooks_go_to_torch():
    model = make()
    for runner in (NumbaRunner(model), GraphRunner(model, record=by_hand)):
        for name in ("none", "concat"):
            cache = new_cache(model, name=name)
            runner.logits(single(IDS[:5]), cache, torch.tensor([[4]]))
        assert runner.torch.positions_computed == 10
        with Trace(model) as trace:
            runner.logits(single(IDS[:5]), new_cache(model), torch.tensor([[4]]))
        assert trace.rows and runner.torch.positions_computed == 15
        runner.logits(single(IDS[:5]), new_cache(model), torch.tensor([[4]]))
        assert runner.positions_computed == 20 and runner.torch.positions_computed == 15


def test_weights_that_change_or_move_are_noticed():
    """Kernels read memory by address: a model cast or edited after the runner was made must not be read at the old one."""
    model = make()
    for kind in ("numba", "graph"):
        runner = runners(model)[kind]
        feed(runner, model, IDS, [4])
        model.layers[1].ffn.up_proj.weight.mul_(0.5)
        wanted = feed(TorchRunner(model), model, IDS, [4])
        torch.testing.assert_close(feed(runner, model, IDS, [4]), wanted)
    runner = NumbaRunner(model)
    feed(runner, model, IDS, [4])
    model.bfloat16()
    wanted = feed(NumbaRunner(model), model, IDS, [4])
    assert torch.equal(feed(runner, model, IDS, [4]), wanted)
    model.layers[2].float()
    wanted = feed(TorchRunner(model.float()), model, IDS, [4])
    torch.testing.assert_close(feed(runner, model, IDS, [4]), wanted)
    model.layers[0].attn.q_proj.weight = torch.nn.Parameter(torch.zeros(48, 48), False)
    wanted = feed(TorchRunner(model), model, IDS, [4])
    torch.testing.assert_close(feed(runner, model, IDS, [4]), wanted)


def test_a_model_that_became_unfit_is_refused():
    model = make()
    runner = NumbaRunner(model)
    feed(runner, model, IDS, [4])
    model.half()
    with pytest.raises(ValueError, match="no longer run this model.*float16"):
        runner.logits(single(IDS[:4]), new_cache(model, dtype=torch.float32), torch.tensor([[3]]))


def test_threads_are_as_they_were(default_folder):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine = Engine.from_pretrained(default_folder, device="cpu")
        seen = []
        watch = lambda logits, context: (seen.append(torch.get_num_threads()), logits)[1]  # noqa: E731
        for _ in engine.stream("One two", SamplingParams(max_new_tokens=2, processors=(watch,))):
            assert torch.get_num_threads() == 2
        assert seen == [1, 1]
    finally:
        torch.set_num_threads(before)


def test_nan_is_not_hidden():
    for runner in (NumbaRunner(MODEL), NumbaRunner(MODEL, max_rows=0)):
        cache = new_cache(MODEL)
        feed(runner, MODEL, IDS, [3], cache)
        cache.keys[1, 0, 0, 1, 0] = torch.nan
        assert feed(runner, MODEL, IDS, [1], cache).isnan().all()


def test_the_last_position_of_the_context():
    """nanochat PR#520: the rope table ended before the cache did."""
    model = make(max_position_embeddings=24)
    wanted = feed(TorchRunner(model), model, IDS, [24])
    for kind in ("numba", "prefill", "graph"):
        cache = new_cache(model)
        torch.testing.assert_close(
            feed(runners(model)[kind], model, IDS, [20, 1, 1, 1, 1], cache), wanted
        )
        with pytest.raises(CacheError, match="context of 24"):
            feed(runners(model)[kind], model, IDS, [1], cache)


def swap(path, module):
    def change(model):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, module)

    return change


class Parallel(Block):
    """A block whose modules have the usual names, but which computes something else."""


class Odd(torch.nn.Linear):
    pass


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda m: m.half(), "float16"),
        (swap("layers.1.attn.q_proj", Odd(48, 48)), r"layers\.1\.attn\.q_proj is a Odd"),
        (swap("layers.0.attn.k_norm", torch.nn.LayerNorm(8)), "k_norm is a LayerNorm"),
        (swap("norm", torch.nn.LayerNorm(48)), "norm is a LayerNorm"),
        (lambda m: setattr(m.layers[1].attn, "window", 4), "differ in their attention window"),
        (
            lambda m: setattr(m.layers[0].ffn.up_proj, "weight", torch.nn.Parameter(torch.randn(48, 80).T)),
            "not contiguous",
        ),
        (lambda m: m.to("meta"), "meta"),
        (lambda m: setattr(m.layers[2].attn, "scale", 1.0), "attention window or scale"),
        (lambda m: m.layers.append(Parallel(m.config, 3)), "Block, not Parallel"),
    ],
)  # fmt: skip
def test_models_that_the_kernels_cannot_run_are_named(change, reason, caplog):
    model = make()
    change(model)
    assert why_not(make()) is None
    with pytest.raises(ValueError, match=reason) as error:
        RUNNERS["numba"](model)
    assert "runner='torch'" in str(error.value)
    if model.norm.weight.device.type == "cpu":
        with caplog.at_level(logging.INFO, "llm_engine"):
            assert isinstance(RUNNERS["auto"](model), TorchRunner)
        assert str(error.value) in caplog.text


def test_other_activations_and_kinds_of_model_go_to_torch():
    assert "gelu" in why_not(make(hidden_act="gelu"))

    class Mine(Transformer):
        pass

    assert "Mine" in why_not(Mine(MODEL.config))


def test_without_numba_the_engine_runs_on_torch_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with caplog.at_level(logging.INFO, "llm_engine"):
        assert isinstance(RUNNERS["auto"](MODEL), TorchRunner)
    assert "pip install numba" in caplog.text


def test_the_package_does_not_import_numba_before_it_is_needed():
    import subprocess

    code = "import sys, llm_engine; print('numba' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_the_default_is_on():
    """LLMs-from-scratch #913, #981: an optimization that nobody had switched on."""
    assert isinstance(RUNNERS[RUNNERS.default](MODEL), NumbaRunner)


def test_a_recording_is_made_once_and_reused():
    runner = GraphRunner(MODEL, record=by_hand, keep=2)
    cache = new_cache(MODEL, name="static")
    feed(runner, MODEL, IDS, [4, *[1] * 20], cache)
    assert runner.recorded == 2  # one for four tokens, one for one
    cache.truncate(0)
    feed(runner, MODEL, IDS, [4, *[1] * 5], cache)
    assert runner.recorded == 2, "the same place in memory: the same recording"
    kept = [new_cache(MODEL, name="static") for _ in range(3)]
    for other in kept:
        feed(runner, MODEL, IDS, [1], other)
    assert runner.recorded == 5 and len(runner._recordings) == 2, "the oldest are let go"


def test_a_graph_reads_nothing_of_the_cache_on_the_host(monkeypatch):
    """What is recorded must not depend on numbers that were read while recording."""
    monkeypatch.setattr("llm_engine.embedding.check_ids", lambda *_: None)  # made on the CPU only
    runner = GraphRunner(MODEL, record=by_hand)
    cache = new_cache(MODEL, name="static")
    feed(runner, MODEL, IDS, [6], cache)
    steps = []
    runner.record = lambda step: (steps.append(step), by_hand(step))[1]
    feed(runner, MODEL, IDS, [1], cache)
    forbidden = ("item", "tolist", "__int__", "__bool__", "__float__", "__index__", "nonzero")
    saved = {name: getattr(torch.Tensor, name) for name in forbidden}

    def refuse(*_, **__):
        raise AssertionError("a value was read on the host")

    try:
        for name in forbidden:
            setattr(torch.Tensor, name, refuse)
        steps[0]()
    finally:
        for name, method in saved.items():
            setattr(torch.Tensor, name, method)


def test_graphs_need_a_gpu():
    with pytest.raises(ValueError, match="needs a model on a CUDA device, not cpu"):
        RUNNERS["cuda-graph"](MODEL)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["growing", "static"])
def test_recorded_steps_on_a_gpu(name):
    model = make().to("cuda")
    runner = RUNNERS["auto"](model)
    assert isinstance(runner, GraphRunner) and runner.record is capture
    cache = CACHES[name](model.config, 1, "cuda", torch.float32)
    wanted = feed(TorchRunner(MODEL), MODEL, IDS, [40])
    torch.testing.assert_close(feed(runner, model, IDS, [30, *[1] * 10], cache).cpu(), wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_default_engine_on_a_gpu(default_folder):
    engine = Engine.from_pretrained(default_folder, device="cuda", dtype="float32")
    answer = engine.generate("The capital of France is", SamplingParams(max_new_tokens=2))
    assert answer.text.startswith(" Paris") and engine.runner.recorded


PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a",
    "1, 2, 3, 4, 5,",
    "Water boils at",
    "今天天气很好,我们",
    "Die Hauptstadt von Deutschland",
    "SELECT name FROM users WHERE",
    "Dear Sir or Madam,\n\nI am",
    "🙂 means that",
]


@pytest.fixture(scope="module")
def pair(default_folder):
    plain = Engine.from_pretrained(default_folder, cache="growing", runner="torch", device="cpu")
    return plain, Engine(plain.model, plain.tokenizer)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_same_tokens_on_the_default_model(pair, prompt):
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    plain, fast = (engine.generate(prompt, params) for engine in pair)
    assert isinstance(pair[1].runner, NumbaRunner) and plain.token_ids == fast.token_ids
    assert fast.positions_computed == len(fast.prompt_ids) + 11


def test_logits_within_a_ten_thousandth_on_the_default_model(pair):
    ids = pair[0].encode("The quick brown fox jumps over the lazy dog. " * 8)
    caches = [engine.new_cache() for engine in pair]
    for end in (60, 61, 62, 70):
        a, b = (engine.step(ids[:end], cache) for engine, cache in zip(pair, caches, strict=True))
        assert (a - b).abs().max() < 1e-4
    assert pair[1].runner.torch.positions_computed == 0
