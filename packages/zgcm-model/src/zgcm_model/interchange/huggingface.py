"""Model folders as published: ``config.json`` and safetensors files, strict both ways."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from zgcm_model.config import ModelConfig
from zgcm_model.decoder import Decoder
from zgcm_model.interchange.names import published_parameters
from zgcm_model.kernels import AttentionKernel
from zgcm_model.sharding import local_part

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


def save_pretrained(
    decoder: Decoder,
    directory: str | os.PathLike[str],
    *,
    eos_id: int | None = None,
    max_shard_bytes: int = 4 * 10**9,
) -> None:
    """Write ``config.json`` and the weights under their published names.

    With sharded parameters every rank must call this; rank 0 writes. Padding rows of the vocabulary are left
    out, so the files hold exactly the rows that take part in the softmax.

    Args:
        decoder: the model.
        directory: made if missing; each file is written under another name and renamed when complete.
        eos_id: end-of-document id of the tokenizer, written for other programs as their end and padding id.
        max_shard_bytes: weights are split into files of at most this size, one tensor at least.

    Raises:
        ValueError: a parameter has no published name.
    """
    folder, rows = Path(directory), decoder.config.real_vocab_size
    writes = not dist.is_initialized() or dist.get_rank() == 0
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
    plan = _plan_files(published_parameters(decoder), max_shard_bytes)
    index: dict[str, str] = {}
    total = 0
    for file, parameters in plan.items():
        tensors = {key: _full(key, parameter, rows) for key, parameter in parameters.items()}
        total += sum(_bytes(tensor) for tensor in tensors.values())
        index |= dict.fromkeys(tensors, file)
        if writes:
            _replace(folder / file, partial(_save, tensors))
    if writes:
        config = replace(decoder.config, vocab_size=rows, vocab_padding=0)
        if len(plan) > 1:
            _write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": index})
        ends = {"eos_token_id": eos_id, "pad_token_id": eos_id}
        _write_json(folder / "config.json", config.to_huggingface() | ends)


def load_pretrained(
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    kernel: str | AttentionKernel = "auto",
    vocab_rows: int | None = None,
) -> Decoder:
    """Build a decoder from a folder written by :func:`save_pretrained` or published under the same names.

    Args:
        directory: holds ``config.json`` and safetensors files.
        dtype: of the parameters; the files' own when left out.
        kernel: attention kernel.
        vocab_rows: pad the vocabulary with zero rows up to this many; they never enter a softmax.

    Returns:
        The decoder, on the CPU.

    Raises:
        ValueError: a file is missing, truncated or of another shape, keys are missing or unexpected, or
            ``vocab_rows`` is below the vocabulary.
    """
    folder = Path(directory)
    config = read_config(folder)
    if vocab_rows is not None:
        if vocab_rows < config.vocab_size:
            raise ValueError(
                f"vocab_rows={vocab_rows} is below the vocabulary of {config.vocab_size}; set at least that"
            )
        padding = config.vocab_padding + vocab_rows - config.vocab_size
        config = replace(config, vocab_size=vocab_rows, vocab_padding=padding)
    with torch.device("meta"):
        decoder = Decoder(config, kernel=kernel)
    decoder.to(dtype or _stored_dtype(folder)).to_empty(device="cpu")
    load_weights(decoder, folder)
    return decoder


def load_weights(decoder: Decoder, directory: str | os.PathLike[str]) -> None:
    """Read published weights into a decoder that exists, sharded or not; no communication.

    Args:
        decoder: filled in place; vocabulary rows beyond the stored ones must be padding and become zero.
        directory: holds the safetensors files.

    Raises:
        ValueError: a file is missing or truncated, a shape differs, or keys are missing or unexpected.
    """
    folder = Path(directory)
    parameters, files = published_parameters(decoder), stored_files(folder)
    _check_keys(set(parameters), set(files))
    for file in sorted(set(files.values())):
        with torch.no_grad(), open_tensors(folder / file) as stored:
            for key in (k for k, f in files.items() if f == file):
                parameter = parameters[key]
                full = _fit(key, stored.get_tensor(key), parameter, decoder.config)
                target = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                target.copy_(local_part(full, parameter))


def read_config(folder: Path) -> ModelConfig:
    """Read ``config.json``.

    Args:
        folder: where it lies.

    Returns:
        The configuration.

    Raises:
        ValueError: the file is missing, no JSON, or describes another architecture.
    """
    return ModelConfig.from_huggingface(_read_json(folder / "config.json"))


def stored_files(folder: Path) -> dict[str, str]:
    """Map each stored key to the file that holds it.

    Args:
        folder: where the safetensors files lie.

    Returns:
        Key -> file name.

    Raises:
        ValueError: there are no weights, or a file is truncated.
    """
    if (folder / _INDEX).exists():
        return dict(_read_json(folder / _INDEX)["weight_map"])
    with open_tensors(folder / _SINGLE) as stored:
        return dict.fromkeys(stored.keys(), _SINGLE)


def open_tensors(path: Path) -> safe_open:
    """Open a safetensors file, naming the file in every error.

    Args:
        path: the file.

    Returns:
        The open file, a context manager.

    Raises:
        ValueError: the file is missing, truncated or no safetensors file.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist; point at a folder that holds config.json and its weights")
    try:
        return safe_open(str(path), framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or no safetensors file ({error}); copy it again") from error


def _plan_files(parameters: dict[str, Tensor], limit: int) -> dict[str, dict[str, Tensor]]:
    groups: list[dict[str, Tensor]] = [{}]
    used = 0
    for key, parameter in parameters.items():
        if groups[-1] and used + _bytes(parameter) > limit:
            groups.append({})
            used = 0
        groups[-1][key] = parameter
        used += _bytes(parameter)
    if len(groups) == 1:
        return {_SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _full(key: str, parameter: Tensor, vocab_rows: int) -> Tensor:
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    whole = whole[:vocab_rows] if key in _VOCABULARY else whole
    return whole.detach().cpu().contiguous()


def _fit(key: str, stored: Tensor, parameter: Tensor, config: ModelConfig) -> Tensor:
    """Pad a vocabulary table with zero rows where the config says so; refuse any other shape."""
    rows = config.vocab_size - config.vocab_padding
    expected = [rows, *parameter.shape[1:]] if key in _VOCABULARY else list(parameter.shape)
    if list(stored.shape) != expected and not (key in _VOCABULARY and stored.shape == parameter.shape):
        raise ValueError(
            f"{key} is stored with shape {list(stored.shape)} but the model needs {expected}; "
            "use the config.json that belongs to these weights"
        )
    if missing := parameter.shape[0] - stored.shape[0]:
        return torch.cat((stored, stored.new_zeros(missing, *stored.shape[1:])))
    return stored


def _check_keys(expected: set[str], given: set[str]) -> None:
    missing, unexpected = sorted(expected - given), sorted(given - expected)
    if missing or unexpected:
        raise ValueError(
            f"the files do not fit the model; missing: {_listed(missing)}; "
            f"unexpected: {_listed(unexpected)}; use the config.json that belongs to these weights"
        )


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(keys) or "none"


def _stored_dtype(folder: Path) -> torch.dtype:
    files = stored_files(folder)
    if _VOCABULARY[0] not in files:
        raise ValueError(f"{_VOCABULARY[0]} is missing in {folder}; point at the folder of a complete model")
    with open_tensors(folder / files[_VOCABULARY[0]]) as stored:
        dtype: torch.dtype = stored.get_tensor(_VOCABULARY[0]).dtype
        return dtype


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    unfinished = path.with_name(path.name + ".partial")
    write(unfinished)
    unfinished.replace(path)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2) + "\n"
    _replace(path, lambda unfinished: _write_text(text, unfinished))


def _write_text(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; point at a folder that holds config.json and its weights")
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON ({error}); copy it again") from error
    return content
