"""Parameter names: ours and the published ones.

Two published names mislead and are kept: ``post_attention_layernorm`` is the norm before attention and
``post_feedforward_layernorm`` the norm before the feed-forward network.
"""

import re

from torch import Tensor, nn

_TOP = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attention_norm.weight": "post_attention_layernorm.weight",
    "feed_forward_norm.weight": "post_feedforward_layernorm.weight",
    "attention.": "self_attn.",
    "feed_forward.": "mlp.",
}
_WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")


def bare_name(name: str) -> str:
    """Drop what wrappers (compilation, activation checkpointing) put into a parameter's name.

    Args:
        name: as ``named_parameters`` gives it.

    Returns:
        The name the unwrapped decoder would give.
    """
    return _WRAPPERS.sub("", name)


def published_name(name: str) -> str:
    """Translate a parameter name of :class:`~zgcm_model.decoder.Decoder`.

    Args:
        name: ours, such as ``layers.0.attention.q_proj.weight``.

    Returns:
        The published one, such as ``model.layers.0.self_attn.q_proj.weight``.

    Raises:
        ValueError: the name is none of the decoder's.
    """
    if name in _TOP:
        return _TOP[name]
    if match := re.fullmatch(r"layers\.(\d+)\.(.+)", name):
        index, rest = match.groups()
        for ours, theirs in _IN_LAYER.items():
            if rest.startswith(ours):
                return f"model.layers.{index}.{theirs}{rest.removeprefix(ours)}"
    raise ValueError(f"parameter {name!r} has no published name; only the decoder's own can be written")


def published_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a decoder by published name.

    Args:
        model: a decoder, wrapped or not.

    Returns:
        Published name -> parameter, in the decoder's order.
    """
    return {published_name(bare_name(name)): parameter for name, parameter in model.named_parameters()}
