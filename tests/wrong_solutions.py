"""Planted wrong solutions: what a learner plausibly writes for each exercise, and what is wrong with it.

`WRONG["15_attention:attention"]` lists replacements in the source of that chapter's solution cell. Each stands for a
misconception, not for a slip of the keyboard, and each must fail in the exercise's own test cell.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Wrong:
    """`old` stands once in the source of the solution cell; with `new` in its place the solution is wrong."""

    old: str
    new: str
    why: str  # what a learner believed

    def apply(self, source: str) -> str:
        """The wrong cell. Raises `ValueError` if `old` is not there, or more than once."""
        if source.count(self.old) != 1:
            raise ValueError(f"stands {source.count(self.old)} times in the cell: {self.old!r}")
        return source.replace(self.old, self.new)


WRONG: dict[str, list[Wrong]] = {
    "11_config:head-size": [
        Wrong(
            "    if stated is not None:\n        return stated\n",
            "",
            "D is always H / N, whatever head_dim says",
        ),
        Wrong(
            "if heads < 1 or hidden % heads:",
            "if heads < 1:",
            "a width that cannot be cut evenly is rounded down",
        ),
    ],
    "11_config:read-rope": [
        Wrong(
            ' or raw.get("rope_parameters") or {}',
            " or {}",
            "there is one spelling, the older one",
        ),
        Wrong(
            'older = flat.pop("type", "default")\n    flat.setdefault("rope_type", older)',
            'flat["rope_type"] = flat.pop("type", flat.get("rope_type", "default"))',
            "of `type` and `rope_type` the older word wins",
        ),
        Wrong(
            "flat.setdefault(key, raw[key])",
            "flat[key] = raw[key]",
            "the rope_theta beside the dictionary wins over the one inside",
        ),
    ],
    "11_config:read-eos": [
        Wrong(
            "for page in (raw, generation):",
            "for page in ((generation or raw),):",
            "generation_config.json replaces config.json, where it adds to it",
        ),
        Wrong(
            "if stated is None:",
            "if not stated:",
            "token id 0 is no token id",
        ),
    ],
    "12_weights:parse-header": [
        Wrong(
            'unpack("<Q"', 'unpack(">Q"', "the bytes of a number are stored the way we write digits"
        ),
        Wrong(
            ", 8 + length\n",
            ", length\n",
            "positions are counted from the header, so the first eight bytes are forgotten",
        ),
    ],
    "12_weights:name-rules": [
        Wrong(
            "(rule, re.fullmatch(rule.source, name))",
            "(rule, re.match(rule.source, name))",
            "a rule that fits the beginning of a name fits the name",
        ),
        Wrong(
            "rule.target and match.expand(rule.target)",
            "rule.target",
            "the layer's number moves into the target by itself",
        ),
    ],
    "12_weights:gguf-unpermute": [
        Wrong(
            "weight.reshape(heads, rows // heads // 2, 2, *rest)",
            "weight.reshape(heads, 2, rows // heads // 2, *rest)",
            "to undo a permutation is to do it once more",
        ),
        Wrong(
            "weight.reshape(heads, rows // heads // 2, 2, *rest)",
            "weight.reshape(1, rows // 2, 2, *rest)",
            "all rows are shuffled together, across the heads",
        ),
    ],
    "13_tokenizer:split-special": [
        Wrong(
            "sorted(special, key=len, reverse=True)",
            "list(special)",
            "a regular expression finds the longest alternative by itself",
        ),
        Wrong(
            "map(re.escape, longest_first)",
            "longest_first",
            "a special token's spelling is harmless as a pattern",
        ),
        Wrong(
            "enumerate(pieces) if piece]",
            "enumerate(pieces)]",
            "empty strings between two special tokens do no harm",
        ),
    ],
    "13_tokenizer:with-bos": [
        Wrong(
            "[bos_id, *ids[start:]]",
            "[bos_id, *ids]",
            "BOS is always added, also to a text that has one",
        ),
        Wrong(
            "[bos_id, *ids[start:]]",
            "[bos_id, *(id for id in ids if id != bos_id)]",
            "only once at the front means only once at all",
        ),
    ],
    "13_tokenizer:incremental-detokenizer": [
        Wrong(
            "self._strip(self._decoder.decode(data))",
            'self._strip(data.decode("utf8", errors="replace"))',
            "each token is some whole characters",
        ),
        Wrong(
            "        if self.skip_special_tokens and id in self.tokenizer.special_ids:\n"
            '            return ""\n',
            "",
            "special tokens have no text of their own",
        ),
    ],
    "14_embedding:rms-norm": [
        Wrong(
            "wide = x.float()\n",
            "wide = x.float() - x.float().mean(-1, keepdim=True)\n",
            "RMSNorm subtracts the mean, as LayerNorm does",
        ),
        Wrong(
            "torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)",
            "(wide.pow(2).mean(-1, keepdim=True).sqrt() + self.eps).reciprocal()",
            "epsilon is added to the root, not under it",
        ),
        Wrong(
            "self.weight * wide.to(x.dtype)",
            "(self.weight * wide).to(x.dtype)",
            "it makes no difference when the result is cast back",
        ),
        Wrong("wide = x.float()\n", "wide = x\n", "half precision is wide enough for squares"),
        Wrong(
            "wide.pow(2).mean(-1, keepdim=True)",
            "wide.pow(2).mean()",
            "one mean for all tokens together",
        ),
    ],
    "14_embedding:rope-apply": [
        Wrong(
            "x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]\n"
            "    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)",
            "x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2], x[..., 2 * half :]\n"
            "    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)\n"
            "    return torch.cat([turned, rest], dim=-1)",
            "pairs are neighbors, as in the paper, whatever the weights were made for",
        ),
        Wrong(
            "a * cos - b * sin, b * cos + a * sin",
            "a * cos + b * sin, b * cos - a * sin",
            "the sense of rotation does not matter",
        ),
        Wrong("a * sin, rest]", "a * sin]", "every component is rotated, so there is no rest"),
    ],
    "14_embedding:rope-llama3": [
        Wrong(
            "(turns - low) / (high - low)",
            "(high - turns) / (high - low)",
            "fast pairs are slowed down and slow ones kept",
        ),
        Wrong(
            "turns = original * frequencies",
            "turns = max_positions * frequencies",
            "turns are counted in the longer context",
        ),
        Wrong(
            "original * frequencies / (2 * math.pi)",
            "original * frequencies",
            "an angle in radians is a number of turns",
        ),
        Wrong(
            ".clamp(0, 1)\n",
            ".clamp(0, 1).round()\n",
            "a pair is either scaled or not: there is nothing between the bands",
        ),
    ],
    "15_attention:visible": [
        Wrong("mask = key <= query", "mask = key < query", "a token does not look at itself"),
        Wrong(
            "mask = key <= query",
            "mask = torch.ones(len(key), query.shape[1], key.shape[2], dtype=torch.bool)\n"
            "    mask = mask.tril(key.shape[2] - query.shape[1])",
            "the mask is the lower triangle, wherever the slots stand",
        ),
        Wrong(
            "key > query - window",
            "key >= query - window",
            "a window of w holds w tokens besides the token itself",
        ),
        Wrong(
            "mask & (key >= 0) & (query >= 0)",
            "mask & (query >= 0)",
            "padding need not be hidden: it has seen nothing",
        ),
    ],
    "15_attention:repeat-kv": [
        Wrong(
            "x.repeat_interleave(groups, dim=1)",
            "x.repeat(1, groups, 1, 1)",
            "the whole set of heads again and again: 0 1 2 0 1 2",
        ),
    ],
    "15_attention:attention": [
        Wrong("(q * self.scale) @", "q @", "the scale is a detail"),
        Wrong("(q * self.scale)", "(q * self.scale**2)", "the scores are divided by D"),
        Wrong(
            ".softmax(-1, dtype",
            ".softmax(-2, dtype",
            "the softmax runs over the queries",
        ),
        Wrong(
            "scores.masked_fill(hidden, -torch.inf).softmax",
            "scores.softmax",
            "a mask may be applied after the softmax",
        ),
        Wrong(
            "probs.masked_fill(hidden, 0).to(q.dtype)",
            "probs.to(q.dtype)",
            "every row sees something",
        ),
        Wrong(
            "(q * self.scale) @ k.transpose(-1, -2)",
            "q @ k.transpose(-1, -2) * self.scale",
            "to scale before or after the product is the same, in any dtype",
        ),
    ],
    "16_ffn_and_transformer:feed-forward": [
        Wrong(
            "self.act(self.gate_proj(x)) * self.up_proj(x)",
            "self.gate_proj(x) * self.act(self.up_proj(x))",
            "gate and up are interchangeable",
        ),
        Wrong(
            "self.act(self.gate_proj(x)) * self.up_proj(x)",
            "self.act(self.gate_proj(x) * self.up_proj(x))",
            "the activation comes after the product",
        ),
    ],
    "16_ffn_and_transformer:block": [
        Wrong(
            "x = x + self.attn(self.attn_norm(x), batch, cache)",
            "x = self.attn_norm(x)\n        x = x + self.attn(x, batch, cache)",
            "the norm is applied to the stream itself",
        ),
        Wrong(
            "x = x + self.attn(self.attn_norm(x), batch, cache)\n        return x + ",
            "return x + self.attn(self.attn_norm(x), batch, cache) + ",
            "attention and feed-forward both read what came into the layer",
        ),
        Wrong(
            "x = x + self.attn(",
            "x = self.attn(",
            "attention replaces the stream",
        ),
        Wrong(
            "self.ffn(self.ffn_norm(x))",
            "self.ffn(self.attn_norm(x))",
            "one norm serves both halves of a layer",
        ),
    ],
    "16_ffn_and_transformer:runner": [
        Wrong(
            "        picked = hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1]))\n"
            "        return self.model.lm_head(picked)",
            "        logits = self.model.lm_head(hidden)\n"
            "        return logits.gather(1, rows[..., None].expand(-1, -1, logits.shape[-1]))",
            "all logits are computed, and most are thrown away",
        ),
        Wrong(
            "hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1]))",
            "hidden[:, rows[0]]",
            "all sequences are asked for the same rows",
        ),
        Wrong(
            "hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1]))",
            "hidden[:, -rows.shape[1] :]",
            "it is always the last rows that are wanted",
        ),
    ],
    "17_sampler:temperature": [
        Wrong(
            "distance / max(",
            "distance * max(",
            "a higher temperature makes larger logits",
        ),
        Wrong(
            "logits.amax(-1, keepdim=True)",
            "logits.max()",
            "one largest logit for all rows together",
        ),
        Wrong(
            "logits = logits.to(torch.promote_types(logits.dtype, torch.float32))",
            "pass",
            "float16 can hold the quotient",
        ),
        Wrong(
            "distance = logits - logits.amax(-1, keepdim=True)",
            "distance = logits",
            "the softmax takes care of large numbers, so nothing can overflow before it",
        ),
    ],
    "17_sampler:top-p": [
        Wrong(
            "before < self.p",
            "cumulative < self.p",
            "the token that crosses p is out",
        ),
        Wrong(
            "keep = torch.zeros_like(keep_ranked).scatter(-1, order, keep_ranked)",
            "keep = keep_ranked",
            "rank and token id are the same",
        ),
        Wrong("before < self.p", "before <= self.p", "p reached exactly asks for one more"),
        Wrong(
            "logits.masked_fill(~keep, -torch.inf)",
            "logits.masked_fill(~keep, 0)",
            "a logit of 0 is a probability of 0",
        ),
    ],
    "17_sampler:repetition-penalty": [
        Wrong(
            "torch.where(logits > 0, logits / self.penalty, logits * self.penalty)",
            "logits / self.penalty",
            "to divide makes every logit smaller, also a negative one",
        ),
        Wrong(
            "[*context.prompt_ids, *context.output_ids]",
            "[*context.output_ids]",
            "only what the model wrote can be repeated",
        ),
        Wrong(
            " > 0\n"
            "        lowered = torch.where(logits > 0, logits / self.penalty, logits * self.penalty)\n"
            "        return torch.where(seen, lowered, logits)",
            "\n"
            "        power = self.penalty**seen\n"
            "        return torch.where(logits > 0, logits / power, logits * power)",
            "each occurrence is penalized again",
        ),
    ],
    "18_engine:unseen": [
        Wrong(
            "min(seen, len(ids) - 1)",
            "seen",
            "what the cache has seen need never be fed again",
        ),
        Wrong(
            "return list(ids[start:]), start",
            "return list(ids[start:]), 0",
            "what is fed begins at position 0",
        ),
        Wrong(
            "min(seen, len(ids) - 1)",
            "len(ids) - 1",
            "one new token is all that is ever fed",
        ),
    ],
    "18_engine:why-finished": [
        Wrong(
            "    if token_id in stop_ids:\n"
            '        return "stop", token_id\n'
            "    if matched is not None:\n"
            '        return "stop", matched\n'
            "    if new_tokens >= limit:\n"
            '        return "length", None\n',
            "    if new_tokens >= limit:\n"
            '        return "length", None\n'
            "    if token_id in stop_ids:\n"
            '        return "stop", token_id\n'
            "    if matched is not None:\n"
            '        return "stop", matched\n',
            "at the limit the length is the reason, whatever else happened",
        ),
        Wrong("new_tokens >= limit", "new_tokens > limit", "the limit may be passed by one"),
        Wrong(
            "if token_id in stop_ids:",
            "if token_id and token_id in stop_ids:",
            "token id 0 is no token",
        ),
    ],
    "18_engine:stop-matcher": [
        Wrong(
            "        keep = max(\n"
            "            (n for s in self.stops for n in range(1, len(s)) if self.held.endswith(s[:n])),\n"
            "            default=0,\n"
            "        )\n",
            "        keep = 0\n",
            "a stop string arrives in one piece",
        ),
        Wrong(
            "(n for s in self.stops for n in range(1, len(s)) if self.held.endswith(s[:n]))",
            "(min(len(s) - 1, len(self.held)) for s in self.stops)",
            "so many characters are always held back",
        ),
        Wrong(
            "min(ends)",
            "ends[0]",
            "the stop string that is listed first wins",
        ),
        Wrong(
            "for n in range(1, len(s)) if self.held.endswith(s[:n])",
            "for n in (1,) if self.held.endswith(s[:n])",
            "only the first character of a stop string must be held back",
        ),
    ],
    "19_verify:expected-shapes": [
        Wrong(
            '"attn.q_proj": (B, T, N * D)',
            '"attn.q_proj": (B, T, H)',
            "N * D is always H",
        ),
        Wrong(
            '"attn.v_proj": (B, T, K * D)',
            '"attn.v_proj": (B, T, N * D)',
            "there are as many value heads as query heads",
        ),
        Wrong(
            '"attn.k_rotated": (B, K, T, D)',
            '"attn.k_rotated": (B, N, T, D)',
            "keys are repeated before they are rotated",
        ),
        Wrong(
            '"attn.heads": (B, N, T, D)',
            '"attn.heads": (B, T, N, D)',
            "heads stand behind the tokens, as they were split off",
        ),
    ],
    "19_verify:relative-difference": [
        Wrong(
            "off, size = (found - expected).norm(dim=-1), expected.norm(dim=-1)",
            "off, size = (found - expected).norm(), expected.norm()",
            "one length for the whole tensor: a large vector hides a small one",
        ),
        Wrong(
            "    if not (found.isfinite().all() and expected.isfinite().all()):\n"
            '        return float("inf")\n',
            "",
            "NaN shows by itself",
        ),
        Wrong(
            "torch.where(off == 0, 0.0, off / size)",
            "off / size",
            "nothing is divided by zero",
        ),
    ],
    "19_verify:first-divergence": [
        Wrong(
            "not row.relative <= tolerance",
            "row.relative > tolerance",
            "what is not within the tolerance is above it: NaN is forgotten",
        ),
        Wrong(
            "    for row in rows:\n"
            "        if row.relative is not None and not row.relative <= tolerance:\n"
            "            return row\n"
            "    return None\n",
            "    far = [r for r in rows if r.relative is not None and not r.relative <= tolerance]\n"
            "    return max(far, key=lambda r: r.relative, default=None)\n",
            "the worst difference is the cause",
        ),
    ],
    "20_kv_cache:concat-cache": [
        Wrong(
            "torch.cat([old.k, new.k], 2)",
            "torch.cat([new.k, old.k], 2)",
            "the order of slots does not matter, so keys, values and positions may each have their own",
        ),
        Wrong(
            "torch.cat([old.v, new.v], 2)", "torch.cat([old.v, new.v], 1)", "axis 1 is the tokens'"
        ),
        Wrong(
            "self.bytes_copied += old.k.nbytes + old.v.nbytes\n",
            "self.bytes_copied += new.k.nbytes + new.v.nbytes\n",
            "only what is new is copied",
        ),
        Wrong(
            "self.bytes_copied += old.k.nbytes + old.v.nbytes\n",
            "self.bytes_copied += old.k.nbytes + old.v.nbytes\n        self.kept[layer] = kv\n",
            "what was appended is permanent at once",
        ),
    ],
    "20_kv_cache:cache-bytes": [
        Wrong(
            "2 * config.num_hidden_layers",
            "config.num_hidden_layers",
            "keys are kept, and values forgotten",
        ),
        Wrong(
            "config.num_key_value_heads * config.head_dim",
            "config.num_attention_heads * config.head_dim",
            "every query head keeps keys of its own",
        ),
        Wrong(
            "config.num_key_value_heads * config.head_dim",
            "config.hidden_size",
            "a key is as wide as the hidden vector",
        ),
    ],
    "20_kv_cache:static-cache": [
        Wrong(
            "self.seen.copy_(torch.minimum(self.seen, limit))",
            "self.seen.copy_(limit)",
            "truncate sets the length, so that it can also make a cache longer",
        ),
        Wrong(
            "self.seen.copy_(torch.minimum(self.seen, limit))",
            "self.seen = torch.minimum(self.seen, limit)",
            "a new tensor is as good as the old one",
        ),
        Wrong(
            "        self._enter_positions()\n        self._used = int(",
            "        self._used = int(",
            "it is enough to lower the length: old positions are forgotten by themselves",
        ),
    ],
    "21_streaming:stream-to": [
        Wrong(
            "                on_chunk(chunk)\n",
            "                if not on_chunk(chunk):\n                    break\n",
            "what the callback returns says whether to go on",
        ),
        Wrong(
            "except StopStreaming:",
            "except Exception:",
            "every error of the callback is a wish to stop",
        ),
        Wrong(
            "        except StopStreaming:\n            pass\n",
            "        except StopStreaming:\n            return None\n",
            "an answer that was stopped is no answer",
        ),
    ],
    "21_streaming:regroup": [
        Wrong(
            "while size := first(held):",
            "if size := first(held):",
            "one piece of text completes at most one piece",
        ),
        Wrong(
            "        if held:\n            yield held\n",
            "",
            "what is not complete at the end is dropped",
        ),
    ],
    "21_streaming:percentile": [
        Wrong("math.ceil(", "math.floor(", "the place is rounded down"),
        Wrong(
            "sorted(values)[",
            "values[",
            "the values come in order",
        ),
        Wrong(
            "len(values) * percent / 100",
            "len(values) * (percent / 100)",
            "in which order one multiplies and divides makes no difference",
        ),
        Wrong(
            "    return sorted(values)[",
            "    values.sort()\n    return values[",
            "the caller's list may be put in order",
        ),
    ],
    "22_memory_wall:token-bytes": [
        Wrong(
            "    size -= sum(p[1:].nbytes for p in model.embed.parameters() if id(p) not in head)\n",
            "",
            "the whole embedding is read for one token",
        ),
        Wrong(
            "for p in model.embed.parameters() if id(p) not in head)",
            "for p in model.embed.parameters())",
            "a tied embedding is never read, since the head has another name",
        ),
        Wrong(
            "slots, model.norm.weight.dtype)",
            "slots, torch.float32)",
            "the cache is always float32",
        ),
    ],
    "22_memory_wall:dots": [
        Wrong(
            "    for o in range(first + 4 * step, last):\n"
            "        for r in range(x.shape[0]):\n"
            "            p = np.float32(0)\n"
            "            for i in range(w.shape[1]):\n"
            "                p += widen(w[o, i]) * x[r, i]\n"
            "            _put(out, bias, r, o, p, add)\n",
            "",
            "the number of lines is a multiple of four",
        ),
        Wrong(
            "                p += widen(w[o, i]) * x[r, i]\n            _put(",
            "                p += w[o, i] * x[r, i]\n            _put(",
            "bfloat16 bits can be multiplied as they are",
        ),
    ],
    "22_memory_wall:finish": [
        Wrong(
            "part = fast_exp(top[t, n] - largest)",
            "part = np.float32(1)",
            "parts can be added as they are",
        ),
        Wrong(
            "        if whole != 0:\n"
            "            for i in range(n * D, (n + 1) * D):\n"
            "                out[i] /= whole\n",
            "        for i in range(n * D, (n + 1) * D):\n            out[i] /= whole\n",
            "every head has seen something",
        ),
    ],
    "30_int8:round-to-nearest": [
        Wrong(".round_()", ".trunc_()", "to make whole numbers is to cut off the fraction"),
        Wrong(".clamp_(*scheme.levels)", "", "a quotient never leaves the levels"),
        Wrong(
            "    if offset is not None:\n        grouped = grouped - offset.float()[..., None]\n",
            "",
            "the offset comes in only when numbers are restored",
        ),
    ],
    "30_int8:dequantize": [
        Wrong(
            "    if scheme.bits == 4 and scheme.symmetric:\n        values -= 8\n",
            "",
            "a nibble is the number it looks like",
        ),
        Wrong(
            "    if offset is not None:\n        values += offset.float()[..., None]\n",
            "",
            "a scale is all that is needed",
        ),
        Wrong(".flatten(1)[:, :columns]", ".flatten(1)", "padding is part of the row"),
    ],
    "30_int8:quantize-rows": [
        Wrong("/ 127\n", "/ 128\n", "int8 reaches from -128 to 128"),
        Wrong(".round().to(torch.int8)", ".to(torch.int8)", "a conversion to int8 rounds"),
        Wrong(
            "x.abs().amax(dim=-1)",
            "x.amax(dim=-1)",
            "the largest number is the one with the largest size",
        ),
    ],
    "31_int4:solve-scales": [
        Wrong(
            "return cw / cc, None",
            "return (importance * grouped).sum(-1) / weighted.sum(-1), None",
            "the best scale is the mean weight over the mean code",
        ),
        Wrong(
            "weighted = importance * codes",
            "weighted = codes",
            "importance is counted once, with the weights",
        ),
        Wrong(
            "scale, (w - scale * c) / one",
            "scale, (scale * c - w) / one",
            "the offset is subtracted when numbers are restored",
        ),
    ],
    "31_int4:sqnr": [
        Wrong(
            "weight.float().square(), (weight - approximation).float().square()",
            "weight.float().abs(), (weight - approximation).float().abs()",
            "decibels are made of amplitudes",
        ),
        Wrong(
            "signal * loudness, noise * loudness",
            "signal, noise * loudness",
            "loudness matters for the noise only",
        ),
        Wrong(
            "(weight - approximation).float().square()",
            "(weight.float().square() - approximation.float().square()).abs()",
            "noise is the difference of the squares",
        ),
    ],
    "31_int4:keep-worst": [
        Wrong(
            "name))[:count]",
            "name), reverse=True)[:count]",
            "many decibels are much noise",
        ),
        Wrong(
            "(decibels[name], name)",
            "decibels[name]",
            "of equals whichever comes first in the dictionary is taken",
        ),
    ],
    "32_memory:weight-bytes": [
        Wrong(
            "schemes[owner].bytes(*weight.shape)",
            "weight.numel() * schemes[owner].bits // 8",
            "scales take no memory",
        ),
        Wrong(
            "weight in model.named_parameters()",
            "weight in model.state_dict().items()",
            "a shared weight is stored twice",
        ),
        Wrong(
            "weight.numel() * dtype.itemsize",
            "weight.numel() * weight.dtype.itemsize",
            "the skeleton's dtype is the one that will be loaded",
        ),
    ],
    "32_memory:quantize-tokens": [
        Wrong(
            "divisor = scale.float().masked_fill(scale == 0, 1)",
            "divisor = (x.abs().amax(-1).float() / 127).masked_fill(scale == 0, 1)",
            "divide by the exact scale, store the rounded one",
        ),
        Wrong(
            "x.abs().amax(-1).float() / 127)",
            "x.abs().amax(-1).float() / 128)",
            "int8 reaches from -128 to 128",
        ),
        Wrong(
            "round_up(x.abs().amax(-1).float() / 127)",
            "round_up(x.amax(-1).float() / 127)",
            "the largest number is the one with the largest magnitude",
        ),
    ],
    "32_memory:int8-cache-bytes": [
        Wrong(
            "(config.head_dim + torch.bfloat16.itemsize)",
            "config.head_dim",
            "scales take no memory",
        ),
        Wrong(
            "config.num_key_value_heads",
            "config.num_attention_heads",
            "every query head keeps keys of its own",
        ),
    ],
    "33_integer_kernels:half": [
        Wrong(
            " * np.float32(2.0**112)",
            "",
            "once the bits are in place, the number is right",
        ),
        Wrong(
            "(wide & np.uint32(0x8000)) << np.uint32(16) | ",
            "",
            "the sign moves with the rest",
        ),
    ],
    "33_integer_kernels:put-in-order": [
        Wrong(
            "x[first : first + far], x[first + far : first + group]",
            "x[first : first + group : 2], x[first + 1 : first + group : 2]",
            "the two nibbles of a byte are neighboring columns",
        ),
        Wrong(
            "    for i in range(len(out)):\n        out[i] = 0\n",
            "",
            "the array that is handed in is empty",
        ),
    ],
    "33_integer_kernels:int8-row": [
        Wrong("bits_at(scale + 2 * g)", "bits_at(scale)", "a row has one scale"),
        Wrong(
            "float_at(sums + 4 * g)",
            "float_at(sums)",
            "one sum of inputs serves all groups",
        ),
        Wrong(
            "x + 2 * CHUNK, factor",
            "x + CHUNK, factor",
            "an address counts numbers, not bytes",
        ),
    ],
    "34_gguf:gguf-strings": [
        Wrong(
            "        if at > end_of_data:\n"
            '            raise GGUFError(f"a string of {length:,} bytes reaches beyond the end")\n',
            "",
            "a slice that reaches too far raises by itself",
        ),
        Wrong('"utf8"', '"latin1"', "a byte is a character"),
    ],
    "34_gguf:rope-from-factors": [
        Wrong(
            "(keep > 1e-5) & (keep < 1 - 1e-5)",
            "(keep >= 0) & (keep <= 1)",
            "the flat ends belong to the line",
        ),
        Wrong(
            "np.polyfit(turns[ramp].numpy(), keep[ramp].numpy(), 1)",
            "np.polyfit(keep[ramp].numpy(), turns[ramp].numpy(), 1)",
            "a line fit treats both its variables alike",
        ),
    ],
    "34_gguf:stored-blocks": [
        Wrong(
            "blocks[:, :, 2 if offset is None else 4 :]",
            "blocks[:, :, 2:]",
            "every block has two bytes before its codes",
        ),
        Wrong(
            'packed.view(torch.int8) if block.name == "Q8_0" else packed',
            "packed",
            "bytes are bytes: the sign takes care of itself",
        ),
    ],
}
