"""Scheduling policies: who is served next, and who gives way. One small class each.

`find_policy` finds one by its short name or by import path (`package.module:Class`), so that a policy of one's own
needs no change here: derive from `noria.core.policies.base.Policy`. A policy is part of the engine: one that raises
while a step is planned ends it.
"""

from __future__ import annotations

import importlib
import inspect

from noria.config import SchedulerConfig
from noria.core.policies.base import CountCached, Policy
from noria.errors import OptionError

POLICIES = {
    "fcfs": "noria.core.policies.fcfs:FcfsPolicy",
    "priority": "noria.core.policies.priority:PriorityPolicy",
    "lpm": "noria.core.policies.lpm:LongestPrefixPolicy",
    "fair": "noria.core.policies.fair:FairPolicy",
}

_CHOICES = f"use one of {', '.join(POLICIES)}, or package.module:Class"


def find_policy(name: str) -> type[Policy]:
    """The class that an option names; whoever would load a model first asks before. Raises `OptionError`."""
    path = POLICIES.get(name, name)
    module_name, _, class_name = path.partition(":")
    try:
        if not class_name:
            raise ImportError(f"{path!r} is not of the form package.module:Class")
        policy_class = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError, TypeError, SystemExit) as error:
        raise OptionError(f"there is no scheduling policy {name!r} ({error}); {_CHOICES}") from error
    if not (isinstance(policy_class, type) and issubclass(policy_class, Policy)):
        raise OptionError(
            f"scheduling policy {name!r} is not a subclass of noria.core.policies.base.Policy; {_CHOICES}"
        )
    if inspect.isabstract(policy_class):
        missing = ", ".join(sorted(policy_class.__abstractmethods__))
        raise OptionError(f"scheduling policy {name!r} leaves {missing} undefined; {_CHOICES}")
    return policy_class


def load_policy(config: SchedulerConfig, count_cached: CountCached) -> Policy:
    """The policy that `config.scheduling_policy` names. Raises `OptionError` if there is none."""
    return find_policy(config.scheduling_policy)(config, count_cached)


__all__ = ["POLICIES", "Policy", "find_policy", "load_policy"]
