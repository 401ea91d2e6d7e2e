"""A Hugging Face folder of a Llama model, written as a GGUF file, so that llama.cpp runs the same weights.

Names and row order are those of llama.cpp's own converter:
https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py
"""

import hashlib
import math
import os
import re
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from torch import Tensor

from llm_engine.config import ModelConfig, load_config
from llm_engine.hub import DEFAULT_MODEL, cache_dir, gguf_file
from llm_engine.weights import open_checkpoint

WRITER = 1  # raise it when another file is written: files in the cache are then made again

GGUF_NAMES = {
    r"model\.embed_tokens\.weight": r"token_embd.weight",
    r"model\.norm\.weight": r"output_norm.weight",
    r"lm_head\.weight": r"output.weight",
    r"model\.layers\.(\d+)\.input_layernorm\.weight": r"blk.\1.attn_norm.weight",
    r"model\.layers\.(\d+)\.post_attention_layernorm\.weight": r"blk.\1.ffn_norm.weight",
    r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.(weight|bias)": r"blk.\1.attn_\2.\3",
    r"model\.layers\.(\d+)\.self_attn\.o_proj\.(weight|bias)": r"blk.\1.attn_output.\2",
    r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.(weight|bias)": r"blk.\1.ffn_\2.\3",
}
TYPES = {
    "float32": (torch.float32, GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "bf16": (torch.bfloat16, GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
}


def permute(weight: Tensor, heads: int) -> Tensor:
    """Rows of a q or k projection in GGUF's order: in each head 0, D/2, 1, D/2+1, … (neighbors are rotated together)."""
    rows, *rest = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, *rest).transpose(1, 2).reshape(rows, *rest)


def gguf_name(name: str) -> str:
    """The name GGUF has for a tensor of a Hugging Face folder; raises `ValueError` if it has none."""
    for pattern, replacement in GGUF_NAMES.items():
        if re.fullmatch(pattern, name):
            return re.sub(pattern, replacement, name)
    raise ValueError(f"tensor {name!r} is not known in a Llama model")


def rope_factors(config: ModelConfig) -> np.ndarray | None:
    """What llama.cpp divides each rotation frequency by, for Llama 3's scaled positions; None without scaling."""
    rope, D = config.rope, config.head_dim
    if rope.rope_type == "default":
        return None
    if rope.rope_type != "llama3":
        raise ValueError(f"rope type {rope.rope_type!r} cannot be written as GGUF here")
    wavelength = 2 * math.pi * rope.rope_theta ** (np.arange(0, D, 2) / D)
    context, low, high = (
        rope.original_max_position_embeddings,
        rope.low_freq_factor,
        rope.high_freq_factor,
    )
    smooth = np.clip((context / wavelength - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope.factor + smooth)).astype(np.float32)


def _metadata(writer: GGUFWriter, config: ModelConfig, file_type: LlamaFileType) -> None:
    writer.add_file_type(file_type)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _tokenizer(writer: GGUFWriter, source: Path | None) -> None:
    """Copy what `source`, another GGUF file, says of the tokenizer; without one, the file has token ids and no text."""
    if source is None:
        writer.add_tokenizer_model("no_vocab")
        return
    for name, field in GGUFReader(source).fields.items():
        if name.startswith("tokenizer."):
            kind, *of = field.types
            sub_type = of[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type)


def write_gguf(
    folder: Path, path: Path, precision: str = "float32", tokenizer_from: Path | None = None
) -> Path:
    """Write the model of `folder` to `path`: matrices in `precision`, norms in float32. The file appears whole or not at all."""
    config = load_config(folder)
    if config.model_type != "llama":
        raise ValueError(
            f"only Llama models can be written as GGUF here, not {config.model_type!r}"
        )
    dtype, quantization, file_type = TYPES[precision]
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    writer = GGUFWriter(part, "llama")
    try:
        _metadata(writer, config, file_type)
        _tokenizer(writer, tokenizer_from)
        factors = rope_factors(config)
        if factors is not None:
            writer.add_tensor("rope_freqs.weight", factors)
        checkpoint = open_checkpoint(folder)
        for source in checkpoint.tensors:
            if source == "lm_head.weight" and config.tie_word_embeddings:
                continue  # the embedding's table once more
            name, weight = gguf_name(source), checkpoint.read(source)
            if found := re.fullmatch(r"blk\.\d+\.attn_([qk])\..*", name):
                weight = permute(weight, heads[found[1]])
            if weight.ndim == 1:
                writer.add_tensor(name, weight.float().contiguous().numpy())
            else:  # as bytes: numpy has no bfloat16
                raw = weight.to(dtype).contiguous().view(torch.uint8).numpy()
                writer.add_tensor(name, raw, raw_dtype=quantization)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


def cached_gguf(folder: Path, precision: str) -> Path:
    """Where the GGUF file of these weights is kept; other weights or another writer give another name."""
    stat = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in folder.glob("*.safetensors")]
    stamp = hashlib.sha256(repr((WRITER, str(folder.resolve()), sorted(stat))).encode()).hexdigest()
    return cache_dir() / "benchmarks" / f"{folder.name}-{stamp[:8]}-{precision}.gguf"


def make_gguf(folder: Path, precision: str) -> Path:
    """The file of `cached_gguf`, written if it is not there yet."""
    path = cached_gguf(folder, precision)
    if not path.exists():
        original = folder.resolve() == (cache_dir() / DEFAULT_MODEL).resolve()
        source = gguf_file(DEFAULT_MODEL, progress=False) if original else None
        write_gguf(folder, path, precision, source)
    return path


def read_bytes(path: Path) -> int:
    """Bytes of weights that one token must read: everything but an input table that is not the output table too."""
    sizes = {tensor.name: tensor.n_bytes for tensor in GGUFReader(path).tensors}
    if "output.weight" in sizes:
        del sizes["token_embd.weight"]
    return int(sum(sizes.values()))
