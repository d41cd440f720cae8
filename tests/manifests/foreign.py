"""Kinds that Kubernetes does not have, as far as our manifests use them.

Those of the inference extension come from our definitions in manifests/crds. The tables of the others
come from the projects' API references; a key that is missing there may exist: look it up, then add
it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from tests.manifests import tools

#: Required keys end in `!`. A value is a mapping, a list of one form, or a word of `_WORDS`, or
#: words of an enumeration parted by `|`.
_TABLES = """
keda.sh/v1alpha1 ScaledObject:
  scaleTargetRef!: {apiVersion: text, kind: text, name!: text}
  minReplicaCount: number
  maxReplicaCount: number
  cooldownPeriod: number
  fallback: {failureThreshold!: number, replicas!: number, behavior: static|currentReplicas}
  triggers!: [{type!: text, metadata!: {scalerAddress!: text, metric: text}}]
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        scaleDown:
          stabilizationWindowSeconds: number
          policies: [{type!: Percent|Pods, value!: number, periodSeconds!: number}]
gateway.networking.k8s.io/v1 Gateway:
  gatewayClassName!: text
  infrastructure: {parametersRef: {group!: text, kind!: text, name!: text}}
  listeners!: [{name!: text, port!: port, protocol!: HTTP|HTTPS|TLS|TCP|UDP, hostname: text}]
gateway.networking.k8s.io/v1 HTTPRoute:
  hostnames: [text]
  parentRefs!: [{group: text, kind: text, name!: text, namespace: text, sectionName: text}]
  rules!:
    - name: text
      matches: [{path: {type!: Exact|PathPrefix|RegularExpression, value!: text}}]
      backendRefs!: [{group!: text, kind!: text, name!: text, port: port, weight: number}]
      timeouts: {request: duration, backendRequest: duration}
gateway.envoyproxy.io/v1alpha1 ClientTrafficPolicy:
  targetRefs!: [{group!: text, kind!: text, name!: text}]
  headers:
    earlyRequestHeaders: {remove: [text]}
    requestID: PreserveOrGenerate|Preserve|Generate|Disable
  timeout: {http: {requestReceivedTimeout: duration, requestHeadersReceivedTimeout: duration}}
gateway.envoyproxy.io/v1alpha1 BackendTrafficPolicy:
  targetRefs!: [{group!: text, kind!: text, name!: text}]
  circuitBreaker: {maxConnections: number, maxPendingRequests: number, maxParallelRequests: number}
  timeout: {http: {connectionIdleTimeout: duration}}
gateway.envoyproxy.io/v1alpha1 EnvoyProxy:
  telemetry:
    accessLog:
      settings:
        - format: {type!: JSON|Text, json: texts, text: text}
          sinks!: [{type!: File|ALS|OpenTelemetry, file: {path: text}}]
  bootstrap:
    type!: Merge|Replace|JSONPatch
    jsonPatches: [{op!: add|remove|replace|move|copy|test, path: text, value: any}]
gateway.envoyproxy.io/v1alpha1 EnvoyPatchPolicy:
  type!: text
  targetRef!: {group!: text, kind!: text, name!: text}
  jsonPatches:
    - type!: text
      name!: text
      operation!: {op!: add|remove|replace|move|copy|test, path: text, value: any}
networking.istio.io/v1alpha3 EnvoyFilter:
  workloadSelector!: {labels!: labels}
  configPatches!:
    - applyTo!: HTTP_FILTER|NETWORK_FILTER
      match!: {context!: GATEWAY|ANY, listener: {filterChain: {filter: {name!: text}}}}
      patch!: {operation!: INSERT_FIRST|MERGE, value!: {name: text, typed_config!: envoy}}
networking.istio.io/v1 DestinationRule:
  host!: text
  trafficPolicy!:
    portLevelSettings:
      - port!: {number!: port}
        tls!: {mode!: DISABLE|SIMPLE|MUTUAL|ISTIO_MUTUAL, insecureSkipVerify: flag}
    connectionPool: {http!: {idleTimeout: duration}}
networking.gke.io/v1 HealthCheckPolicy:
  targetRef!: {group!: text, kind!: text, name!: text}
  default!:
    config!:
      type!: HTTP|GRPC
      httpHealthCheck: {requestPath: text, port: port}
      grpcHealthCheck: {portSpecification: USE_FIXED_PORT|USE_SERVING_PORT, port: port}
networking.gke.io/v1 GCPBackendPolicy:
  targetRef!: {group!: text, kind!: text, name!: text}
  default!: {timeoutSec: number, logging: {enabled: flag, sampleRate: number}}
gateway.kgateway.dev/v1alpha1 HTTPListenerPolicy:
  targetRefs!: [{group!: text, kind!: text, name!: text}]
  accessLog: [{fileSink!: {path!: text, jsonFormat: texts, stringFormat: text}}]
agentgateway.dev/v1alpha1 AgentgatewayPolicy:
  targetRefs!: [{group!: text, kind!: text, name!: text}]
  frontend: {accessLog: {attributes: {add: [{name!: text, expression!: text}]}}}
monitoring.coreos.com/v1 ServiceMonitor:
  selector!: {matchLabels!: labels}
  namespaceSelector: {matchNames: [text]}
  endpoints!:
    - port!: text
      path: text
      interval: duration
      scrapeTimeout: duration
      authorization: {type: text, credentials!: {name!: text, key!: text}}
monitoring.coreos.com/v1 PrometheusRule:
  groups!:
    - name!: text
      rules!:
        - {record: text, alert: text, expr!: text, for: duration, labels: labels, annotations: texts}
"""

_WORDS: Mapping[str, Mapping[str, Any]] = {
    "text": {"type": "string"},
    "texts": {"type": "object", "additionalProperties": {"type": "string"}},
    "flag": {"type": "boolean"},
    "any": {},
    "envoy": {"type": "object", "required": ["@type"]},
    "number": {"type": "integer"},
    "port": {"type": "integer", "minimum": 1, "maximum": 65535},
    "duration": {"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"},
    "labels": {
        "type": "object",
        "additionalProperties": {"type": "string", "maxLength": 63},
        "minProperties": 1,
    },
}

_METADATA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$"},
        "namespace": {"type": "string"},
        "labels": _WORDS["labels"],
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["name"],
    "additionalProperties": False,
}


def _schema(form: Any) -> Mapping[str, Any]:
    """A JSON Schema that takes only what a table shows."""
    if isinstance(form, list):
        return {"type": "array", "items": _schema(form[0]), "minItems": 1}
    if isinstance(form, Mapping):
        return {
            "type": "object",
            "properties": {key.rstrip("!"): _schema(value) for key, value in form.items()},
            "required": [key[:-1] for key in form if key.endswith("!")],
            "additionalProperties": False,
        }
    if form in _WORDS:
        return _WORDS[form]
    assert re.search(r"\|", form), form
    return {"enum": form.split("|")}


def _object(header: str, spec: Any) -> Mapping[str, Any]:
    version, _, kind = header.partition(" ")
    return {
        "type": "object",
        "properties": {
            "apiVersion": {"const": version},
            "kind": {"const": kind},
            "metadata": _METADATA,
            "spec": _schema(spec),
        },
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "additionalProperties": False,
    }


def _closed(schema: Any) -> Any:
    """The same schema, without room for unknown keys."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if "properties" in schema and isinstance(schema.get("type"), str):
        closed["additionalProperties"] = False
    return closed


def _defined() -> Iterator[tuple[tuple[str, str], Mapping[str, Any]]]:
    """The objects that our own definitions define."""
    for path in sorted((tools.MANIFESTS / "crds").glob("*.yaml")):
        for document in tools.documents(path.read_text()):
            if document["kind"] != "CustomResourceDefinition":
                continue
            group, kind = document["spec"]["group"], document["spec"]["names"]["kind"]
            for version in document["spec"]["versions"]:
                schema = _closed(version["schema"]["openAPIV3Schema"])
                schema["properties"] |= {"metadata": _METADATA, "kind": {"const": kind}}
                yield (f"{group}/{version['name']}", kind), schema


#: By apiVersion and kind.
SCHEMAS: Mapping[tuple[str, str], Mapping[str, Any]] = dict(_defined()) | {
    (header.partition(" ")[0], header.partition(" ")[2]): _object(header, spec)
    for header, spec in yaml.safe_load(_TABLES).items()
}
