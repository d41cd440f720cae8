"""Rules for any set of rendered objects, of overlays and of the chart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from extproc.config.settings import ServerSection
from tests.manifests import parts, strict
from tests.manifests.tools import Document

#: What a picker may do, and nothing else: group, resource, verbs. Discovery lists collections and
#: watches them, single objects too (by field selector); a Lease is held by writing it.
READ = frozenset({"list", "watch"})
HOLD = frozenset({"get", "create", "update"})
ALLOWED = {
    ("", "pods"): READ,
    ("inference.networking.k8s.io", "inferencepools"): READ,
    ("inference.networking.x-k8s.io", "inferencepools"): READ,
    ("inference.networking.x-k8s.io", "inferenceobjectives"): READ,
    ("inference.networking.x-k8s.io", "inferencemodelrewrites"): READ,
    ("llm-d.ai", "inferenceobjectives"): READ,
    ("llm-d.ai", "inferencemodelrewrites"): READ,
}
SLICES = {("discovery.k8s.io", "endpointslices"): READ}
LEASES = {("coordination.k8s.io", "leases"): HOLD}
TURN = frozenset({"get", "patch"})
SCALES = {
    ("apps", "deployments/scale"): TURN,
    ("apps", "statefulsets/scale"): TURN,
    ("leaderworkerset.x-k8s.io", "leaderworkersets/scale"): TURN,
    ("kubeai.org", "models/scale"): TURN,
    ("autoscaling", "horizontalpodautoscalers"): frozenset({"list"}),
    ("keda.sh", "scaledobjects"): frozenset({"list"}),
    ("", "configmaps"): frozenset({"get", "create", "patch"}),
    ("", "events"): frozenset({"create"}),
    **LEASES,
}
REVIEWS = {
    ("authentication.k8s.io", "tokenreviews"): frozenset({"create"}),
    ("authorization.k8s.io", "subjectaccessreviews"): frozenset({"create"}),
}

#: Seconds between the end of the drain and the end of the process that we leave at least.
_AIR_S = 5


def wrong(documents: Sequence[Document]) -> Iterator[str]:
    """Everything that is wrong with a set of objects."""
    for document in documents:
        yield from strict.problems(document)
    yield from _twice(documents)
    for pod in parts.pods(documents):
        yield from _unsafe(pod)
    for pod, container in parts.pickers(documents):
        yield from _picker(documents, pod, container)
    yield from _selectors(documents)
    yield from _monitors(documents)
    yield from _references(documents)


def granted(documents: Sequence[Document]) -> dict[tuple[str, str], frozenset[str]]:
    """Verbs by API group and resource, of all roles."""
    result: dict[tuple[str, str], frozenset[str]] = {}
    for role in (*parts.of_kind(documents, "Role"), *parts.of_kind(documents, "ClusterRole")):
        for rule in role["rules"]:
            for group in rule.get("apiGroups", ()):
                for resource in rule["resources"]:
                    key = (group, resource)
                    result[key] = result.get(key, frozenset()) | set(rule["verbs"])
    return result


def named(documents: Sequence[Document]) -> list[list[str]]:
    """Names that rules of roles are limited to."""
    roles = parts.of_kind(documents, "Role")
    return [
        rule["resourceNames"] for role in roles for rule in role["rules"] if "resourceNames" in rule
    ]


def scraped_paths(documents: Sequence[Document]) -> list[str]:
    """Paths that the account may get whose token a ServiceMonitor sends; it may do nothing else."""
    monitor = parts.only(documents, "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"]["key"] == "token"
    name = endpoint["authorization"]["credentials"]["name"]
    secret = parts.only(documents, "Secret", name)
    assert secret["type"] == "kubernetes.io/service-account-token"
    account = secret["metadata"]["annotations"]["kubernetes.io/service-account.name"]
    bindings = [
        binding
        for kind in ("RoleBinding", "ClusterRoleBinding")
        for binding in parts.of_kind(documents, kind)
        if account in {subject["name"] for subject in binding["subjects"]}
    ]
    (binding,) = bindings
    (rule,) = parts.only(documents, "ClusterRole", binding["roleRef"]["name"])["rules"]
    assert rule["verbs"] == ["get"]
    paths: list[str] = rule["nonResourceURLs"]
    return paths


def _twice(documents: Sequence[Document]) -> Iterator[str]:
    observed = set()
    for document in documents:
        key = (document["apiVersion"], document["kind"], document["metadata"]["name"])
        if key in observed:
            yield f"{key} stands twice"
        observed.add(key)


def _unsafe(pod: Document) -> Iterator[str]:
    """Violations of the Pod Security Standard `restricted`, and a writable root file system."""
    outer = pod.get("securityContext", {})
    if not outer.get("runAsNonRoot") or not outer.get("runAsUser"):
        yield "a pod may run as root"
    if outer.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "a pod has no seccomp profile"
    for container in pod["containers"]:
        inner = container.get("securityContext", {})
        name = container["name"]
        if inner.get("allowPrivilegeEscalation") is not False:
            yield f"{name} may gain privileges"
        if inner.get("readOnlyRootFilesystem") is not True:
            yield f"{name} may write to its root file system"
        if inner.get("capabilities", {}).get("drop") != ["ALL"]:
            yield f"{name} keeps capabilities"
        if not container.get("resources", {}).get("requests") or "memory" not in container[
            "resources"
        ].get("limits", {}):
            yield f"{name} asks for no resources, or has no memory limit"


def _picker(documents: Sequence[Document], pod: Document, container: Document) -> Iterator[str]:
    settings = parts.resolved(documents, pod, container)
    server = settings.server
    wanted = {
        "grpc": server.grpc_port,
        "health": server.grpc_health_port,
        "metrics": server.metrics_port,
    }
    if settings.xds.enabled:
        wanted["xds"] = settings.xds.port
    if settings.autoscaling.keda.enabled:
        wanted["keda"] = settings.autoscaling.keda.port
    ports = parts.ports(container)
    if ports != wanted:
        yield f"ports are {ports}, and the picker listens on {wanted}"
    for probe, service in (("readinessProbe", "readiness"), ("livenessProbe", "liveness")):
        if container[probe]["grpc"] != {"port": server.grpc_health_port, "service": service}:
            yield f"{probe} asks {container[probe]['grpc']}"
    yield from _grace(pod, container, server)


def _grace(pod: Document, container: Document, server: ServerSection) -> Iterator[str]:
    """The pod is not killed before the drain ends, and no picker ends before its Envoy."""
    waits = _sleep_s(container)
    if pod["terminationGracePeriodSeconds"] < waits + server.drain_timeout_s + _AIR_S:
        yield "the pod is killed before the drain ends"
    for other in pod["containers"]:
        if other is not container and _sleep_s(other) >= waits + server.drain_timeout_s:
            yield f"{other['name']} outlives its picker"


def _sleep_s(container: Document) -> float:
    hook = container.get("lifecycle", {}).get("preStop", {})
    return float(hook.get("sleep", {}).get("seconds", 0))


def _selectors(documents: Sequence[Document]) -> Iterator[str]:
    """Services, budgets and policies select pods that there are, and ports have their names."""
    templates = [item["spec"]["template"] for item in parts.of_kind(documents, "Deployment")]
    for kind, where in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        for entry in parts.of_kind(documents, kind):
            if not any(
                parts.selects(entry["spec"][where], template["metadata"]["labels"])
                for template in templates
            ):
                yield f"{kind} {entry['metadata']['name']} selects no pod"
    for service in parts.of_kind(documents, "Service"):
        chosen = [
            template
            for template in templates
            if parts.selects(
                {"matchLabels": service["spec"]["selector"]}, template["metadata"]["labels"]
            )
        ]
        if len(chosen) != 1:
            yield f"Service {service['metadata']['name']} selects {len(chosen)} Deployments"
            continue
        named = {
            name for container in chosen[0]["spec"]["containers"] for name in parts.ports(container)
        }
        for port in service["spec"]["ports"]:
            if port["targetPort"] not in named:
                yield f"Service {service['metadata']['name']}: no port {port['targetPort']}"


def _monitors(documents: Sequence[Document]) -> Iterator[str]:
    """Each ServiceMonitor finds one Service: replicas behind two would be scraped twice."""
    for monitor in parts.of_kind(documents, "ServiceMonitor"):
        wanted = {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]}
        chosen = [
            service["metadata"]["name"]
            for service in parts.of_kind(documents, "Service")
            if parts.selects(monitor["spec"]["selector"], service["metadata"].get("labels", {}))
            and wanted & {port["name"] for port in service["spec"]["ports"]}
        ]
        if len(chosen) != 1:
            yield f"ServiceMonitor {monitor['metadata']['name']} finds the Services {chosen}"


def _references(documents: Sequence[Document]) -> Iterator[str]:
    """References of objects exist: pools, Services, gateways, Deployments, accounts."""
    candidates = {(document["kind"], document["metadata"]["name"]) for document in documents}
    for item in documents:
        for named in _NAMES.get(item["kind"], lambda _: [])(item):
            if (named["kind"], named["name"]) not in candidates:
                yield f"{item['kind']} {item['metadata']['name']} names {named}, which is missing"
    for pool in parts.of_kind(documents, "InferencePool"):
        picker = pool["spec"]["endpointPickerRef"]
        service = parts.of_kind(documents, "Service", picker["name"])
        open_ports = {port["port"] for entry in service for port in entry["spec"]["ports"]}
        if picker["port"]["number"] not in open_ports:
            yield f"InferencePool names {picker}, and there is no such port"


def _of_route(route: Document) -> Iterator[Document]:
    yield from ({"kind": "Gateway", **parent} for parent in route["spec"]["parentRefs"])
    for rule in route["spec"]["rules"]:
        yield from rule["backendRefs"]


def _of_monitor(monitor: Document) -> Iterator[Document]:
    for endpoint in monitor["spec"]["endpoints"]:
        if "authorization" in endpoint:
            yield {"kind": "Secret", "name": endpoint["authorization"]["credentials"]["name"]}


def _of_secret(secret: Document) -> Iterator[Document]:
    account = secret["metadata"].get("annotations", {}).get("kubernetes.io/service-account.name")
    if account:
        yield {"kind": "ServiceAccount", "name": account}


def _of_deployment(deployment: Document) -> Iterator[Document]:
    account = deployment["spec"]["template"]["spec"].get("serviceAccountName")
    if account:
        yield {"kind": "ServiceAccount", "name": account}


#: The references of each kind, as mappings with kind and name.
_NAMES: Mapping[str, Callable[[Document], Iterable[Document]]] = {
    "HTTPRoute": _of_route,
    "Deployment": _of_deployment,
    "ServiceMonitor": _of_monitor,
    "Secret": _of_secret,
    "BackendTrafficPolicy": lambda item: item["spec"]["targetRefs"],
    "ClientTrafficPolicy": lambda item: item["spec"]["targetRefs"],
    "HealthCheckPolicy": lambda item: [item["spec"]["targetRef"]],
    "GCPBackendPolicy": lambda item: [item["spec"]["targetRef"]],
    "HorizontalPodAutoscaler": lambda item: [item["spec"]["scaleTargetRef"]],
    "RoleBinding": lambda item: [item["roleRef"], *item["subjects"]],
    "ClusterRoleBinding": lambda item: [item["roleRef"], *item["subjects"]],
}
