"""deploy/helm and deploy/systemd say what Kubernetes and systemd understand, and what docs/ says of them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "labeler"
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
KUBERNETES = "1.32"

TALLIER = {"tallier": {"winnersPort": 7700, "peers": ["192.0.2.1/32", "192.0.2.2/32"]}}
ROLES: dict[str, dict[str, Any]] = {
    "coordinator": {"coordinator": {"settings": 'public_url = "https://labels.example.org"\n[federation]\n'}},
    "agent": {"gpus": 1, "home": {"storageClass": "fast"}},
    "tallier": TALLIER,
    "a tallier that only adds up": {},
}


def render(tmp_path: Path, role: str) -> list[dict[str, Any]]:
    """The chart's documents for a role, by Go's own text/template, without Helm's own functions."""
    go_template = pytest.importorskip("go_template", reason="go-template is in the extra `containers`")
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    values["role"] = role if role in values | {"coordinator": 0} else "tallier"
    for key, changed in ROLES[role].items():
        values[key] = {**values[key], **changed} if isinstance(changed, dict) else changed
    given, template, made = (tmp_path / name for name in ("values.yaml", "template", "made.yaml"))
    given.write_text(yaml.safe_dump({"Values": values, "Release": {"Name": "hospital-a"}}))
    documents: list[dict[str, Any]] = []
    for path in sorted((CHART / "templates").glob("*.yaml")):
        template.write_text((CHART / "templates" / "_parts.tpl").read_text() + path.read_text())
        go_template.render_template(str(template), str(given), str(made))
        documents += [one for one in yaml.safe_load_all(made.read_text()) if one]
    return documents


def of_kind(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = (one for one in documents if one["kind"] == kind)
    return found


@pytest.mark.long
@pytest.mark.parametrize("role", ROLES)
def test_every_document_of_the_chart_is_what_the_kubernetes_api_takes(tmp_path: Path, role: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is in the extra `containers`")
    documents = render(tmp_path, role)
    kinds = {one["kind"] for one in documents}
    assert kinds == {"StatefulSet", "NetworkPolicy"} | ({"ConfigMap", "Service"} if role == "coordinator" else set())
    for document in documents:
        validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.long
@pytest.mark.parametrize("role", ROLES)
def test_every_container_of_the_chart_is_unprivileged_and_bounded(tmp_path: Path, role: str) -> None:
    spec = of_kind(render(tmp_path, role), "StatefulSet")["spec"]
    assert spec["replicas"] == 1
    pod = spec["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    for container in pod["initContainers"] + pod["containers"]:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container in pod["initContainers"] or "memory" in container["resources"]["limits"]
        mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
        claimed = {claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]}
        assert mounted <= {volume["name"] for volume in pod["volumes"]} | claimed
    learning = {one["name"]: one["resources"]["limits"].get("nvidia.com/gpu") for one in pod["containers"]}
    if role == "agent":
        assert learning == {"agent": 1}
    assert pod.get("runtimeClassName") is None


@pytest.mark.long
@pytest.mark.parametrize("role", ["coordinator", "agent", "tallier"])
def test_the_gpu_profile_gives_cards_a_cache_that_outlives_the_pod_and_a_tallier_nothing(
    tmp_path: Path, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = yaml.safe_load((CHART / "gpu.yaml").read_text())
    known = yaml.safe_load((CHART / "values.yaml").read_text())
    assert profile.keys() <= known.keys()
    plain = of_kind(render(tmp_path, role), "StatefulSet")["spec"]
    monkeypatch.setitem(ROLES, role, {**ROLES[role], **profile})
    spec = of_kind(render(tmp_path, role), "StatefulSet")["spec"]
    pod = spec["template"]["spec"]
    claims = {claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]}
    limits = [one["resources"]["limits"].get("nvidia.com/gpu") for one in pod["containers"]]
    mounts = [one["mountPath"] for every in pod["containers"] for one in every.get("volumeMounts", [])]
    mounts = [path for path in mounts if path == "/cache"]
    if role == "tallier":
        assert (claims, limits, mounts, pod.get("runtimeClassName")) == ({"home"}, [None], [], None)
        return
    assert claims == {"home", "cache"}
    assert [one for one in limits if one] == [1]
    assert mounts == ["/cache"]
    assert pod["runtimeClassName"] == "nvidia"
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    if role == "coordinator":
        assert "runtimeClassName" not in plain["template"]["spec"]
        assert "cache" in {volume["name"] for volume in plain["template"]["spec"]["volumes"]}


@pytest.mark.long
def test_a_site_reaches_the_coordinator_alone_and_only_a_tallier_that_finds_winners_opens_a_port(
    tmp_path: Path,
) -> None:
    policies = {role: of_kind(render(tmp_path, role), "NetworkPolicy")["spec"] for role in ROLES}
    assert policies["agent"]["ingress"] == []
    assert policies["a tallier that only adds up"]["ingress"] == []
    (winners,) = policies["tallier"]["ingress"]
    assert winners["from"] == [{"ipBlock": {"cidr": peer}} for peer in TALLIER["tallier"]["peers"]]
    assert policies["coordinator"]["egress"] == []
    ports = [port["port"] for rule in policies["agent"]["egress"] for port in rule["ports"]]
    assert ports == [53, 53, 443]


@pytest.mark.long
def test_commands_of_chart_and_units_exist_with_their_options(tmp_path: Path) -> None:
    lines = [
        line.removeprefix("ExecStart=/opt/labeler/bin/")
        for unit in UNITS
        for line in unit.read_text().splitlines()
        if line.startswith("ExecStart=/opt/labeler/bin/")
    ]
    for role in ROLES:
        pod = of_kind(render(tmp_path, role), "StatefulSet")["spec"]["template"]["spec"]
        script = pod["initContainers"][0]["args"][0].replace("\\\n", " ")
        lines += re.findall(r"labeler (?:serve|agent|tallier) [^\n]*", script)
        lines += [f"labeler {' '.join(one['args'])}" for one in pod["containers"] if one["name"] != "redis"]
    assert len(lines) > 10
    from workers.commands.catalog import load_commands

    for line in lines:
        words = shlex.split(line.split("||")[-1])[1:]
        command: Any = load_commands()[words.pop(0)]
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        used = {word.split("=")[0] for word in words if word.startswith("--")}
        assert used <= options, line


def test_units_of_roles_that_use_a_gpu_let_its_devices_through_and_no_others() -> None:
    """ProtectClock= allows the clock's device, and before systemd 253 that alone forbids all others."""
    for unit in UNITS:
        lines = unit.read_text().splitlines()
        is_for_gpu = unit.stem in ("labeler-agent", "labeler-embedder")
        assert ("PrivateDevices=no" in lines) == is_for_gpu, unit
        assert [one for one in lines if one.startswith("DeviceAllow=")] == ["DeviceAllow=char-nvidia* rw"] * is_for_gpu


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze on this machine")
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_systemd_understands_every_unit_and_finds_it_locked_up(unit: Path, tmp_path: Path) -> None:
    # The programs that the units start are not installed here; /bin/true stands for them, as nothing else is looked at.
    copy = tmp_path / unit.name
    copy.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text()))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", copy], capture_output=True, text=True
    )
    assert (checked.returncode, checked.stderr) == (0, "")
    secure = ["systemd-analyze", "security", "--offline=true", "--threshold=30", "--no-pager", copy]
    looked = subprocess.run(secure, capture_output=True, text=True)
    assert looked.returncode == 0, looked.stdout[-1500:] + looked.stderr
