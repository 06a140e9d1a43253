"""The shape of a gpt-oss model: one frozen dataclass, read from either checkpoint layout.

The same model is released in two layouts whose `config.json` files name things differently: OpenAI's own
(`num_experts`, `rope_scaling_factor`, `rope_ntk_beta`) and Hugging Face's (`num_local_experts`, and YaRN inside
`rope_scaling`, or inside `rope_parameters` once transformers 5 has written the file again). Everything above this
module sees only `ModelConfig`, so a spelling is dealt with here or nowhere.

Nothing is guessed: a missing key is an error that names it. The exceptions are values that the original layout
never writes because they live in its code (epsilon, alpha, the stop tokens), which are defaults of `ModelConfig`.
"""
from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A configuration value that is missing or cannot be right; the message names the key."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions with YaRN.

    theta: base of the frequencies. factor: how many times the original context is stretched. beta_fast, beta_slow:
    rotations per original context above which a pair is kept, below which it is divided by `factor`.
    original_context: tokens. truncate: whether the two bounds of the ramp are rounded (False for gpt-oss).
    """

    theta: float
    factor: float
    beta_fast: float
    beta_slow: float
    original_context: int
    truncate: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """Everything that determines shapes and arithmetic of a gpt-oss model (source: the released config.json files)."""

    name: str
    num_layers: int
    num_experts: int
    experts_per_token: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    sliding_window: int
    max_position_embeddings: int
    rope: RopeConfig
    rms_norm_eps: float = 1e-5
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    eos_token_ids: tuple[int, ...] = (200002, 199999, 200012)
    pad_token_id: int = 199999

    def __post_init__(self) -> None:
        _check(self)

    # -- derived shapes ------------------------------------------------------------------------------------------
    @property
    def q_size(self) -> int:
        """Width of all query heads together (4096 in the released models, not the hidden size)."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together; values have the same."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Rows of the fused QKV projection."""
        return self.q_size + 2 * self.kv_size

    @property
    def queries_per_kv(self) -> int:
        """How many consecutive query heads read one key/value head."""
        return self.num_heads // self.num_kv_heads

    def is_sliding(self, layer: int) -> bool:
        """True where the layer sees only the last `sliding_window` positions: the even layers, 0 first."""
        if not 0 <= layer < self.num_layers:
            raise ConfigError(f"layer {layer} does not exist; the model has layers 0..{self.num_layers - 1}")
        return layer % 2 == 0

    def with_layers(self, num_layers: int) -> ModelConfig:
        """The same model cut (or stretched) to `num_layers` layers."""
        return replace(self, num_layers=num_layers)

    # -- reading -------------------------------------------------------------------------------------------------
    @classmethod
    def from_dict(cls, raw: dict[str, Any], name: str = "") -> ModelConfig:
        """Read the content of a `config.json` of either layout. ConfigError names what is missing or wrong."""
        reader = _read_hf if "num_local_experts" in raw or "model_type" in raw else _read_original
        return reader(raw, name)

    @classmethod
    def load(cls, path: str | Path) -> ModelConfig:
        """Read `config.json` from a checkpoint folder, or that file itself."""
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"no config.json at {file}; a checkpoint folder holds one") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} is not JSON: {error}") from None
        if not isinstance(raw, dict):
            raise ConfigError(f"{file} holds a {type(raw).__name__}; a JSON object is expected")
        return cls.from_dict(raw, name=str(raw.get("name", file.parent.name)))

    # -- writing -------------------------------------------------------------------------------------------------
    def to_hf_dict(self) -> dict[str, Any]:
        """`config.json` as the Hugging Face layout releases it (YaRN under `rope_scaling`, `rope_theta` beside it)."""
        eos = list(self.eos_token_ids)
        return {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "name": self.name,
            "num_hidden_layers": self.num_layers,
            "num_local_experts": self.num_experts,
            "num_experts_per_tok": self.experts_per_token,
            "experts_per_token": self.experts_per_token,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "sliding_window": self.sliding_window,
            "layer_types": ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(self.num_layers)],
            "max_position_embeddings": self.max_position_embeddings,
            "initial_context_length": self.rope.original_context,
            "rope_theta": self.rope.theta,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": self.rope.factor,
                "beta_fast": self.rope.beta_fast,
                "beta_slow": self.rope.beta_slow,
                "original_max_position_embeddings": self.rope.original_context,
                "truncate": self.rope.truncate,
            },
            "rms_norm_eps": self.rms_norm_eps,
            "swiglu_limit": self.swiglu_limit,
            "hidden_act": "silu",
            "attention_bias": True,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "eos_token_id": eos[0] if _stop_ids(eos[0]) == self.eos_token_ids else eos,
            "pad_token_id": self.pad_token_id,
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    "model.layers.*.self_attn",
                    "model.layers.*.mlp.router",
                    "model.embed_tokens",
                    "lm_head",
                ],
            },
        }

    def to_original_dict(self) -> dict[str, Any]:
        """`config.json` as OpenAI's own layout releases it: sixteen keys, no epsilon, no alpha, no layer types."""
        return {
            "num_hidden_layers": self.num_layers,
            "num_experts": self.num_experts,
            "experts_per_token": self.experts_per_token,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "swiglu_limit": self.swiglu_limit,
            "head_dim": self.head_dim,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "sliding_window": self.sliding_window,
            "initial_context_length": self.rope.original_context,
            "rope_theta": self.rope.theta,
            "rope_scaling_factor": self.rope.factor,
            "rope_ntk_alpha": self.rope.beta_slow,
            "rope_ntk_beta": self.rope.beta_fast,
        }


_COMMON = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "sliding_window": "sliding_window",
}


def _need(raw: dict[str, Any], *keys: str, inside: str = "") -> Any:
    """The value of the first of `keys` that is there; spellings that disagree with each other are an error."""
    found = {key: raw[key] for key in keys if raw.get(key) is not None}
    if not found:
        place = f" in {inside}" if inside else ""
        raise ConfigError(f"config.json lacks {' or '.join(keys)}{place}")
    _agree(found)
    return next(iter(found.values()))


def _agree(found: dict[str, Any]) -> None:
    """ConfigError unless every spelling of a value has the same one."""
    values = list(found.values())
    if any(value != values[0] for value in values[1:]):
        raise ConfigError(f"config.json contradicts itself: {found}; both spellings must have one value")


def _read_original(raw: dict[str, Any], name: str) -> ModelConfig:
    rope = RopeConfig(
        theta=_need(raw, "rope_theta"),
        factor=_need(raw, "rope_scaling_factor"),
        beta_fast=_need(raw, "rope_ntk_beta"),
        beta_slow=_need(raw, "rope_ntk_alpha"),
        original_context=_need(raw, "initial_context_length"),
    )
    _check_rope(rope)
    return ModelConfig(
        name=name,
        num_experts=_need(raw, "num_experts"),
        experts_per_token=_need(raw, "experts_per_token"),
        swiglu_limit=_need(raw, "swiglu_limit"),
        max_position_embeddings=int(rope.original_context * rope.factor),
        rope=rope,
        **{field: _need(raw, key) for field, key in _COMMON.items()},
    )


def _read_hf(raw: dict[str, Any], name: str) -> ModelConfig:
    _check_hf_fixed(raw)
    return ModelConfig(
        name=name,
        num_experts=_need(raw, "num_local_experts"),
        experts_per_token=_need(raw, "num_experts_per_tok", "experts_per_token"),
        swiglu_limit=_need(raw, "swiglu_limit"),
        max_position_embeddings=_need(raw, "max_position_embeddings"),
        rope=_read_hf_rope(raw),
        rms_norm_eps=_need(raw, "rms_norm_eps"),
        eos_token_ids=_stop_ids(_need(raw, "eos_token_id")),
        pad_token_id=_need(raw, "pad_token_id"),
        **{field: _need(raw, key) for field, key in _COMMON.items()},
    )


def _read_hf_rope(raw: dict[str, Any]) -> RopeConfig:
    place, yarn = _yarn(raw)
    kind = yarn.get("rope_type", yarn.get("type"))
    if kind != "yarn":
        raise ConfigError(f"config.json: {place}.rope_type is {kind!r}; gpt-oss uses 'yarn'")
    rope = RopeConfig(
        theta=_need({"rope_theta": raw.get("rope_theta"), f"{place}.rope_theta": yarn.get("rope_theta")},
                    "rope_theta", f"{place}.rope_theta"),
        factor=_need(yarn, "factor", inside=place),
        beta_fast=_need(yarn, "beta_fast", inside=place),
        beta_slow=_need(yarn, "beta_slow", inside=place),
        original_context=_need(yarn, "original_max_position_embeddings", inside=place),
        truncate=_need(yarn, "truncate", inside=place),
    )
    if raw.get("initial_context_length") is not None:
        _agree({"original_max_position_embeddings": rope.original_context,
                "initial_context_length": raw["initial_context_length"]})
    return rope


def _yarn(raw: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Where the YaRN values stand, `rope_scaling` or `rope_parameters`, and the values. Both may, if they agree."""
    given = {place: raw[place] for place in ("rope_scaling", "rope_parameters") if raw.get(place)}
    if not given or not all(isinstance(yarn, dict) for yarn in given.values()):
        raise ConfigError("config.json lacks rope_scaling (or rope_parameters): gpt-oss needs its YaRN values")
    place, yarn = next(iter(given.items()))
    for other, values in given.items():
        for key in sorted(yarn.keys() & values.keys()):
            _agree({f"{place}.{key}": yarn[key], f"{other}.{key}": values[key]})
    return place, yarn


def _stop_ids(eos: Any) -> tuple[int, ...]:
    """The released config.json names one stop token; generation_config.json has all three of them."""
    ids = tuple(eos) if isinstance(eos, list) else (eos,)
    if not ids or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ConfigError(f"config.json: eos_token_id is {eos!r}; a token id or a list of them is expected")
    return (200002, 199999, 200012) if eos == 200002 else ids


def _check_hf_fixed(raw: dict[str, Any]) -> None:
    """Refuse a config that describes arithmetic this library does not have."""
    fixed = {"model_type": "gpt_oss", "attention_bias": True, "tie_word_embeddings": False}
    for key, right in fixed.items():
        if key in raw and raw[key] != right:
            raise ConfigError(f"config.json: {key} is {raw[key]!r}; gpt-oss has {right!r}")
    kinds = raw.get("layer_types")
    if kinds is not None:
        right = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(len(kinds))]
        if list(kinds) != right or len(kinds) != _need(raw, "num_hidden_layers"):
            raise ConfigError("config.json: layer_types must alternate, sliding_attention first, one entry per layer")


def _check(config: ModelConfig) -> None:
    _check_rope(config.rope)
    for field in fields(config):
        if field.type == "int" and field.name != "pad_token_id":
            value = getattr(config, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{field.name} is {value!r}; a positive whole number is expected")
    if not isinstance(config.pad_token_id, int) or isinstance(config.pad_token_id, bool) or config.pad_token_id < 0:
        raise ConfigError(f"pad_token_id is {config.pad_token_id!r}; a token id is expected")
    for key in ("rms_norm_eps", "swiglu_alpha", "swiglu_limit"):
        value = getattr(config, key)
        if not isinstance(value, (int, float)) or not value > 0:
            raise ConfigError(f"{key} is {value!r}; a positive number is expected")
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(f"num_heads {config.num_heads} is not a multiple of num_kv_heads {config.num_kv_heads}")
    if config.experts_per_token > config.num_experts:
        raise ConfigError(f"experts_per_token {config.experts_per_token} exceeds num_experts {config.num_experts}")
    if config.head_dim % 2:
        raise ConfigError(f"head_dim is {config.head_dim}; rotary positions need an even one")
    for key in ("hidden_size", "intermediate_size"):
        if getattr(config, key) % 32:
            raise ConfigError(f"{key} is {getattr(config, key)}; MXFP4 needs a multiple of its group of 32")


def _check_rope(rope: RopeConfig) -> None:
    for key in ("theta", "factor", "beta_fast", "beta_slow", "original_context"):
        value = getattr(rope, key)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            raise ConfigError(f"rope {key} is {value!r}; a positive number is expected")
    if rope.beta_slow >= rope.beta_fast:
        raise ConfigError(f"rope beta_slow {rope.beta_slow} must be below beta_fast {rope.beta_fast}")
    if not isinstance(rope.truncate, bool):
        raise ConfigError(f"rope truncate is {rope.truncate!r}; true or false is expected")


_ROPE = RopeConfig(theta=150000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0, original_context=4096)


def _released(name: str, num_layers: int, num_experts: int) -> ModelConfig:
    return ModelConfig(
        name=name, num_layers=num_layers, num_experts=num_experts, experts_per_token=4, hidden_size=2880,
        intermediate_size=2880, num_heads=64, num_kv_heads=8, head_dim=64, vocab_size=201088, sliding_window=128,
        max_position_embeddings=131072, rope=_ROPE,
    )


PRESETS: dict[str, ModelConfig] = {
    "gpt-oss-20b": _released("gpt-oss-20b", num_layers=24, num_experts=32),
    "gpt-oss-120b": _released("gpt-oss-120b", num_layers=36, num_experts=128),
    "nano": replace(
        _released("nano", num_layers=6, num_experts=16),
        hidden_size=224, intermediate_size=288, num_heads=8, num_kv_heads=2,
    ),
}


def preset(name: str) -> ModelConfig:
    """The configuration of a known model: 'gpt-oss-20b', 'gpt-oss-120b' or 'nano'."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ConfigError(f"no preset is called {name!r}; there are {', '.join(PRESETS)}") from None
