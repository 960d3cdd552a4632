"""Optimizer state that is loaded by parameter name, so that it survives another grouping."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

# Entries of each algorithm's state; all of them or none are present.
STATE_KEYS: dict[str, frozenset[str]] = {
    "muon": frozenset({"momentum_buffer"}),
    "adam": frozenset({"step", "exp_avg", "exp_avg_sq"}),
}

# Entries of a group that say which parameters it holds, not how they are updated.
_MEMBERSHIP = ("params", "param_names")

Group = dict[str, Any]


def saved_names(groups: Sequence[Mapping[str, Any]]) -> list[list[str]] | None:
    """Return the parameter names of each group of a state dict, where it has them.

    Args:
        groups: its ``param_groups``; torch's distributed checkpoint puts the names in place of the numbers.

    Returns:
        Names group by group, or None when they were not given.
    """
    names = []
    for group in groups:
        keys = group["params"]
        if not all(isinstance(key, str) for key in keys):
            keys = group.get("param_names")
        if keys is None or len(keys) != len(group["params"]):
            return None
        names.append(list(keys))
    return names


def regroup(saved: Mapping[str, Any], groups: Sequence[Group]) -> dict[str, Any]:
    """Rearrange a state dict to the groups of another optimizer, by parameter name.

    Args:
        saved: a state dict; returned as it is when it or ``groups`` has no names.
        groups: the groups of the optimizer that will load it.

    Returns:
        A state dict with one entry per group and parameter of ``groups``, in their order.

    Raises:
        ValueError: names are missing or unexpected, or parameters that are now in one group were saved with
            different settings.
    """
    old = saved_names(saved["param_groups"])
    if old is None or not all("param_names" in group for group in groups):
        return dict(saved)
    keys: dict[str, Hashable] = {}
    home: dict[str, Group] = {}
    for group, names in zip(saved["param_groups"], old, strict=True):
        keys.update(zip(names, group["params"], strict=True))
        home.update(dict.fromkeys(names, group))
    _check_names(set(keys), {name for group in groups for name in group["param_names"]})
    return {
        **saved,
        "state": {keys[name]: saved["state"][keys[name]] for name in keys if keys[name] in saved["state"]},
        "param_groups": [_merged(group, keys, home) for group in groups],
    }


def _check_names(saved: set[str], wanted: set[str]) -> None:
    missing, unexpected = sorted(wanted - saved), sorted(saved - wanted)
    if missing or unexpected:
        raise ValueError(
            f"the state dict does not belong to these parameters: missing {missing}, unexpected {unexpected}; "
            "load the state of the same model"
        )


def _merged(group: Group, keys: Mapping[str, Hashable], home: Mapping[str, Group]) -> Group:
    """Return a group's saved settings; all its parameters must agree on them."""
    names = group["param_names"]
    settings: Group = {key: value for key, value in group.items() if key not in _MEMBERSHIP}
    for position, name in enumerate(names):
        found = {key: value for key, value in home[name].items() if key not in _MEMBERSHIP}
        for key, value in found.items():
            if position and key in settings and not _same(settings[key], value):
                raise ValueError(
                    f"{key}: parameters {names[0]!r} and {name!r} are in one group now but were saved with "
                    f"{settings[key]!r} and {value!r}; keep them in groups of their own"
                )
        settings.update(found)
    return {**settings, "params": [keys[name] for name in names], "param_names": list(names)}


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return list(left) == list(right)
    return bool(left == right)


def check_state(saved: Mapping[str, Any]) -> None:
    """Refuse a state dict in which a parameter's state is torn or belongs to the other algorithm.

    Args:
        saved: a state dict; a parameter without any state is one that had no update yet.

    Raises:
        ValueError: entries are missing or unexpected.
    """
    for index, group in enumerate(saved["param_groups"]):
        wanted = STATE_KEYS[group.get("algorithm", "muon")]
        for position, key in enumerate(group["params"]):
            found = set(saved["state"].get(key, {}))
            if found and found != wanted:
                names = group.get("param_names")
                name = names[position] if names else key
                raise ValueError(
                    f"state of parameter {name!r} in group {index} has the entries {sorted(found)} instead of "
                    f"{sorted(wanted)}; it is torn, or the group's algorithm has changed"
                )
