"""The Kubernetes examples, applied to a real API server: each is accepted whole, and what is wrong is refused.

No node runs, so nothing is started. KServe's and llm-d's kinds belong to controllers that cannot be had as a package;
what is checked of them is in test_example_kubernetes.py.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples" / "kubernetes"
FOREIGN = {"kserve.yaml", "kserve-llm.yaml", "llm-d-values.yaml"}
FILES = sorted(path for path in EXAMPLES.glob("[!.]*.yaml") if path.name not in FOREIGN)
KINDS = {
    "ServiceAccount": "api/v1/namespaces/default/serviceaccounts",
    "Service": "api/v1/namespaces/default/services",
    "Secret": "api/v1/namespaces/default/secrets",
    "PersistentVolume": "api/v1/persistentvolumes",
    "PersistentVolumeClaim": "api/v1/namespaces/default/persistentvolumeclaims",
    "Deployment": "apis/apps/v1/namespaces/default/deployments",
    "ScaledObject": "apis/keda.sh/v1alpha1/namespaces/default/scaledobjects",
    "CustomResourceDefinition": "apis/apiextensions.k8s.io/v1/customresourcedefinitions",
}
TOKEN = "of-this-test"  # noqa: S105 - of a server that ends with the test


class RefusedError(Exception):
    """What the server answered."""


class Server:
    """The API server of a cluster without nodes."""

    def __init__(self, port: int, certificate: Path) -> None:
        self._port, self._certificate = port, certificate

    def request(self, method: str, path: str, body: bytes | None = None, kind: str = "application/json") -> Any:
        tls = ssl.create_default_context(cafile=self._certificate)
        connection = http.client.HTTPSConnection("127.0.0.1", self._port, timeout=30, context=tls)
        with contextlib.closing(connection):
            connection.request(method, f"/{path}", body, {"Authorization": f"Bearer {TOKEN}", "Content-Type": kind})
            answer = connection.getresponse()
            found = answer.read()
        if answer.status >= 300:
            raise RefusedError(f"{answer.status}: {found.decode()}")
        return found

    def knows(self, path: str) -> bool:
        """Whether there is something there, and the server itself."""
        with contextlib.suppress(OSError, RefusedError):
            self.request("GET", path)
            return True
        return False

    def apply(self, resource: dict[str, Any]) -> dict[str, Any]:
        """As ``kubectl apply --server-side --validate=strict``.

        Raises:
            RefusedError: the server refuses it.
        """
        path = f"{KINDS[resource['kind']]}/{resource['metadata']['name']}"
        query = "fieldManager=test&force=true&fieldValidation=Strict"
        body = json.dumps(resource).encode()
        return json.loads(self.request("PATCH", f"{path}?{query}", body, "application/apply-patch+yaml"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    printed = subprocess.run(["bash", str(ROOT / "tools" / "kubernetes.sh")], stdout=subprocess.PIPE, text=True)  # noqa: PLW1510
    programs = dict(line.split("=", 1) for line in printed.stdout.splitlines())
    if not programs:
        pytest.skip("building an API server needs go: see tools/kubernetes.sh")
    home = tmp_path_factory.mktemp("kubernetes")
    client, peer, port = _free_ports(3)
    store = f"http://127.0.0.1:{client}"
    key = home / "key"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    (home / "tokens").write_text(f"{TOKEN},admin,admin,system:masters\n")
    etcd = [programs["etcd"], "--data-dir", str(home / "etcd"), "--listen-client-urls", store]
    etcd += ["--advertise-client-urls", store, "--listen-peer-urls", f"http://127.0.0.1:{peer}"]
    api = [programs["kube-apiserver"], "--etcd-servers", store, "--secure-port", str(port), "--bind-address"]
    api += ["127.0.0.1", "--cert-dir", str(home), "--token-auth-file", str(home / "tokens"), "--authorization-mode"]
    api += ["RBAC", "--service-account-key-file", str(key), "--service-account-signing-key-file", str(key)]
    api += ["--service-account-issuer", "https://kubernetes.default.svc", "--service-cluster-ip-range", "10.0.0.0/24"]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((home / "log").open("wb"))
        for command in (etcd, api):
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=home)
            stack.callback(process.wait)
            stack.callback(process.kill)
        made = Server(port, home / "apiserver.crt")
        _until(lambda: made.knows("readyz"), lambda: (home / "log").read_text()[-3000:])
        (definition,) = yaml.safe_load_all(Path(programs["keda"]).read_text())
        made.apply(definition)
        _until(lambda: made.knows(KINDS["ScaledObject"]), lambda: "KEDA's kind is not served")
        yield made


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _until(done: Any, why_not: Any) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline, why_not()
        time.sleep(0.2)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_server_accepts_every_resource(server: Server, path: Path) -> None:
    for resource in yaml.safe_load_all(path.read_text()):
        accepted = server.apply(resource)
        assert accepted["kind"] == resource["kind"]
        assert accepted["metadata"]["name"] == resource["metadata"]["name"]


def test_mount_options_reach_the_volume(server: Server) -> None:
    for resource in yaml.safe_load_all((EXAMPLES / "deployment-volume.yaml").read_text()):
        accepted = server.apply(resource)
        if resource["kind"] == "PersistentVolume":
            assert "nconnect=16" in accepted["spec"]["mountOptions"]
            return
    raise AssertionError("no volume")


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            "deployment.yaml",
            lambda found: found["spec"]["template"]["spec"]["containers"][0].update(arguments=[]),
            "arguments",
        ),
        (
            "deployment.yaml",
            lambda found: found["spec"]["selector"]["matchLabels"].update(app="other"),
            "does not match",
        ),
        ("scale-to-zero.yaml", lambda found: found["spec"].update(minReplicaCount="zero"), "numeric"),
        ("scale-to-zero.yaml", lambda found: found["spec"].update(minReplicas=0), "minReplicas"),
    ],
    ids=["unknown field", "selector that matches nothing", "wrong type", "unknown field of KEDA"],
)
def test_the_server_refuses_what_is_wrong(server: Server, file: str, change: Any, message: str) -> None:
    resources = list(yaml.safe_load_all((EXAMPLES / file).read_text()))
    (found,) = (resource for resource in resources if resource["kind"] in {"Deployment", "ScaledObject"})
    found["metadata"]["name"] = "wrong"
    change(found)
    with pytest.raises(RefusedError, match=message):
        server.apply(found)
