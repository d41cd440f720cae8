"""API objects as the server writes them; each builder names only the fact that matters."""

import json

POOL_GROUP = "inference.networking.k8s.io"
OLD_GROUP = "inference.networking.x-k8s.io"


def meta(name, namespace="default", **more):
    return {"name": name, "namespace": namespace, "uid": f"uid-{name}"} | more


def pod(name="a", namespace="default", *, ip="10.0.0.1", app="vllm", ready=True, **more):
    """More: uid, labels, annotations, deleted, phase, created, node."""
    labels = {"app": app} | more.get("labels", {})
    about = meta(name, namespace, labels=labels, annotations=more.get("annotations", {}))
    about["uid"] = more.get("uid", about["uid"])
    about["creationTimestamp"] = more.get("created", "2026-01-01T00:00:00Z")
    if more.get("deleted"):
        about["deletionTimestamp"] = "2026-01-02T00:00:00Z"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": about,
        "spec": {"nodeName": more.get("node", ""), "containers": [{"name": "engine"}]},
        "status": {
            "phase": more.get("phase", "Running"),
            "podIP": ip,
            "conditions": [
                {"type": "Initialized", "status": "True"},
                {"type": "Ready", "status": "True" if ready else "False"},
            ],
        },
    }


def pool(name="pool", namespace="default", *, app="vllm", ports=(8000,), **spec):
    return {
        "apiVersion": f"{POOL_GROUP}/v1",
        "kind": "InferencePool",
        "metadata": meta(name, namespace),
        "spec": {
            "selector": {"matchLabels": {"app": app}},
            "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": {"name": "picker", "port": {"number": 9002}},
        }
        | spec,
    }


def old_pool(name="pool", namespace="default", *, app="vllm", port=8000):
    return {
        "apiVersion": f"{OLD_GROUP}/v1alpha2",
        "kind": "InferencePool",
        "metadata": meta(name, namespace),
        "spec": {
            "selector": {"app": app},
            "targetPortNumber": port,
            "extensionRef": {"name": "picker"},
        },
    }


def ref(name="pool", group=POOL_GROUP, kind="InferencePool"):
    return {"group": group, "kind": kind, "name": name}


def objective(name="high", namespace="default", *, priority=1, pool_ref=None, group="llm-d.ai"):
    spec = {"poolRef": pool_ref or ref()} | ({} if priority is None else {"priority": priority})
    return {
        "apiVersion": f"{group}/v1alpha2",
        "kind": "InferenceObjective",
        "metadata": meta(name, namespace),
        "spec": spec,
    }


def rewrite(name="rewrite", namespace="default", *, rules, created="2026-01-01T00:00:00Z", **more):
    """Rules: pairs of models and of targets with weights. More: pool_ref, group."""
    return {
        "apiVersion": f"{more.get('group', 'llm-d.ai')}/v1alpha2",
        "kind": "InferenceModelRewrite",
        "metadata": meta(name, namespace, creationTimestamp=created),
        "spec": {
            "poolRef": more.get("pool_ref") or ref(),
            "rules": [
                {
                    "matches": [{"model": {"type": "Exact", "value": model}} for model in models],
                    "targets": [
                        {"modelRewrite": name} | ({} if weight is None else {"weight": weight})
                        for name, weight in targets.items()
                    ],
                }
                for models, targets in rules
            ],
        },
    }


def slice_of(service="engines", namespace="default", *, name="engines-1", **more):
    """More: family, ports as name to number, and backends by `backend`."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": meta(name, namespace, labels={"kubernetes.io/service-name": service}),
        "addressType": more.get("family", "IPv4"),
        "ports": [
            {"name": port, "port": number, "protocol": "TCP"}
            for port, number in more.get("ports", {"http": 8000}).items()
        ],
        "endpoints": more.get("backends", []),
    }


def backend(ip="10.0.0.1", name="a", *, ready=True, terminating=False):
    return {
        "addresses": [ip],
        "conditions": {"ready": ready, "serving": True, "terminating": terminating},
        "targetRef": {"kind": "Pod", "name": name, "uid": f"uid-{name}"},
        "nodeName": "node-1",
        "zone": "zone-1",
    }


def text(value):
    return json.dumps(value).encode()


def line(kind, value, version="1"):
    """A watch line, without its end."""
    value = json.loads(json.dumps(value))
    if isinstance(value, dict) and isinstance(value.get("metadata"), dict):
        value["metadata"]["resourceVersion"] = version
    return text({"type": kind, "object": value})


def page(*values, version="1", more=""):
    return text({"metadata": {"resourceVersion": version, "continue": more}, "items": values})
