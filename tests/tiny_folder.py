"""A tiny model folder on disk: random weights, a token for each byte, a chat template."""

import json
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file

from llm_engine.config import load_config
from llm_engine.tokenizer import byte_alphabet
from llm_engine.transformer import Transformer

BOS, EOS, START, END = 256, 257, 258, 259
SPECIAL = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HUGGING_FACE_NAMES = {
    "embed.": "model.embed_tokens.",
    "layers.": "model.layers.",
    "attn_norm.": "input_layernorm.",
    "ffn_norm.": "post_attention_layernorm.",
    ".attn.": ".self_attn.",
    ".ffn.": ".mlp.",
}


def byte_level_library() -> tokenizers.Tokenizer:
    """Ids 0 to 255 are the bytes; the four special tokens come after them."""
    alphabet = byte_alphabet()
    library = tokenizers.Tokenizer(tokenizers.models.BPE({alphabet[b]: b for b in range(256)}, []))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(SPECIAL)
    return library


def write_tiny_folder(folder: Path, **changes) -> Path:
    """Write it, and return the folder. `changes` go into config.json; None leaves a key out."""
    folder.mkdir(parents=True)
    config = {
        "model_type": "llama",
        "vocab_size": 260,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "dtype": "float32",
        **changes,
    }
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config), "utf8")
    weights = {}
    for name, weight in Transformer(load_config(folder)).state_dict().items():
        if name != "norm.weight" and not name.startswith("lm_head"):
            for ours, theirs in HUGGING_FACE_NAMES.items():
                name = name.replace(ours, theirs)
        weights["model.norm.weight" if name == "norm.weight" else name] = weight.to(torch.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    byte_level_library().save(str(folder / "tokenizer.json"))
    tokenizer_config = {"eos_token": "<eos>", "bos_token": "<bos>", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**tokenizer_config, "chat_template": TEMPLATE}), "utf8"
    )
    return folder
