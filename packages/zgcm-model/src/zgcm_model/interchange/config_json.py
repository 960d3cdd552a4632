"""The published ``config.json``, both ways."""

from collections.abc import Mapping
from typing import Any

_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "sliding_window": "window",
    "window_attn_skip_freq": "global_every",
    "partial_rotary_factor": "rotary_percent",
    "rope_theta": "rotary_base",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_positions",
    "initializer_range": "init_std",
}
"""Published key -> field of ModelConfig."""

_FIXED: dict[str, Any] = {
    "model_type": "zgcm",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}
"""What this architecture has no switch for."""

_PADDING = "zgcm_vocab_padding"
_OPTIONAL = {"window_attn_skip_freq": 6, "initializer_range": 0.02}


def write(config: object, windowed: list[bool]) -> dict[str, Any]:
    """Return the content of ``config.json``.

    Args:
        config: the model's; its fields are read by name.
        windowed: for each layer, whether it has a window and a gate.

    Returns:
        Keys and values as published; ``zgcm_vocab_padding`` only where there is padding.
    """
    content: dict[str, Any] = {"architectures": ["ZgcmForCausalLM"], **_FIXED}
    content |= {key: getattr(config, name) for key, name in _FIELDS.items()}
    content["layer_types"] = ["sliding_attention" if w else "full_attention" for w in windowed]
    content["attention_gate_layers"] = windowed
    content |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "use_cache": True}
    if padding := getattr(config, "vocab_padding", 0):
        content[_PADDING] = padding
    return content


def read(content: Mapping[str, Any]) -> dict[str, Any]:
    """Read the content of ``config.json``.

    Args:
        content: the parsed file.

    Returns:
        The fields of a model configuration.

    Raises:
        ValueError: a key is missing, or holds a value that this architecture cannot express.
    """
    given = dict(content)
    if "rope_theta" not in given and isinstance(given.get("rope_parameters"), dict):
        given["rope_theta"] = given["rope_parameters"].get("rope_theta")
    for key, value in _FIXED.items():
        if given.get(key, value) != value:
            raise ValueError(
                f"config.json: {key}={given[key]!r} is not supported; this model needs {value!r}"
            )
    values = {name: given.get(key, _OPTIONAL.get(key)) for key, name in _FIELDS.items()}
    if missing := [key for key, name in _FIELDS.items() if values[name] is None]:
        raise ValueError(f"config.json: {missing[0]} is missing; add it from the published configuration")
    return {**values, "vocab_padding": given.get(_PADDING, 0)}


def check_layers(content: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse layer lists that differ from the regular pattern.

    Args:
        content: the parsed file.
        expected: what :func:`write` gives for its configuration.

    Raises:
        ValueError: a layer has another attention type or gate than the pattern gives.
    """
    every = expected["window_attn_skip_freq"]
    for key in ("layer_types", "attention_gate_layers"):
        given, wanted = content.get(key), list(expected[key])
        if given is None or list(given) == wanted:
            continue
        wrong = [i for i, pair in enumerate(zip(given, wanted, strict=False)) if pair[0] != pair[1]]
        where = f"{given[wrong[0]]!r} at layer {wrong[0]}" if wrong else f"{len(given)} entries"
        raise ValueError(
            f"config.json: {key} has {where}, which window_attn_skip_freq={every} and "
            f"{len(wanted)} layers do not give; only this regular pattern is supported"
        )
