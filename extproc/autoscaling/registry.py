"""Registry of scaling policies: name in the configuration, and class.

A literal table, so that it can be searched. A class here takes its parameters as keyword fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from extproc.autoscaling.interface import ScalingPolicy
from extproc.autoscaling.policies import adaptive, kubeai, queue_depth
from extproc.errors import ConfigError

POLICIES: Mapping[str, type[ScalingPolicy]] = {
    "adaptive": adaptive.AdaptivePolicy,
    "kubeai": kubeai.KubeAIPolicy,
    "queue-depth": queue_depth.QueueDepthPolicy,
}

#: The policy where none is named.
DEFAULT = "adaptive"


def make(kind: str, params: Mapping[str, Any], *, where: str) -> ScalingPolicy:
    """Build a policy from its name and parameters.

    Raises:
        ConfigError: There is no such policy or parameter, or a value is out of range.
    """
    if kind not in POLICIES:
        raise ConfigError(
            f"{where}.policy",
            wanted=f"one of {', '.join(POLICIES)}",
            got=repr(kind),
            fix="name a listed policy",
        )
    cls = POLICIES[kind]
    try:
        return msgspec.convert(params, cls)
    except msgspec.ValidationError as error:
        fields = [field.name for field in msgspec.structs.fields(cls)]  # type: ignore[arg-type]
        raise ConfigError(
            f"{where}.params",
            wanted=f"parameters of {kind}: {', '.join(fields)}",
            got=str(error),
            fix="correct the parameter",
        ) from None
