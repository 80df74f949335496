"""A Pod's only container as a process: with a network, a host name and a read-only root of its own, and its volumes."""

import base64
import ctypes
import os
import re
import signal
import socket
import sys
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

from tests.hosts import Hosts, enter
from tests.launched import ROOT
from tests.program import Program

_CLONE_NEWNS, _CLONE_NEWUTS = 0x00020000, 0x04000000
_RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 32, 4096, 16384, 1 << 18


class NotStartedError(Exception):
    """What `kubectl describe pod` says of a Pod whose container cannot be started."""


class Pod:
    """A Pod of a template; `told` is its log's last line, which is its terminationMessage, too."""

    def __init__(
        self,
        name: str,
        template: dict[str, Any],
        objects: dict[tuple[str, str], dict[str, Any]],
        hosts: Hosts,
        host: int,
        folder: Path,
    ) -> None:
        """Start its container on a host; `folder` is this Pod's own, and claims are beside it."""
        self.name, self.address, self._hosts, self._folder = name, hosts.addresses[host], hosts, folder
        self.labels = template["metadata"]["labels"]
        self._annotations = template["metadata"].get("annotations", {})
        self.spec, self._objects = template["spec"], objects
        (self.container,) = self.spec["containers"]
        self.is_started = self.is_ready = False
        self._answered = time.monotonic()
        environment = self._environment()
        arguments = [_expand(each, environment) for each in self.container["args"]]
        mounts = self._mounts()
        inside = partial(
            _enter_pod, hosts.name(host), name, str(folder), mounts, self.container.get("workingDir", "/data")
        )
        assert "command" not in self.container  # the image's entry point: isthmus
        self.program = Program(*arguments, inside=inside, **environment)

    @property
    def exit_code(self) -> int | None:
        """Return it as a container's: 137 where the process was killed."""
        code = self.program.returncode
        return code if code is None or code >= 0 else 128 - code

    @property
    def told(self) -> str:
        return (self.program.log.strip().splitlines() or [""])[-1]

    def probe(self) -> None:
        """Ask as the kubelet does: until it has started nothing else, then whether it lives and is ready."""
        if self.exit_code is not None:
            self.is_ready = False
        elif not self.is_started:
            self.is_started = self._answers("startup")
        else:
            self.is_ready = self._answers("readiness")
            liveness = self.container["livenessProbe"]
            if self._answers("liveness"):
                self._answered = time.monotonic()
            elif time.monotonic() - self._answered > liveness["failureThreshold"] * liveness["periodSeconds"]:
                self.program.kill()

    def stop(self) -> int:
        """Send SIGTERM; the exit code, which has to be there before the grace period is over."""
        self.program.send_signal(signal.SIGTERM)
        self.program.communicate(timeout=self.spec["terminationGracePeriodSeconds"])
        assert self.exit_code is not None
        return self.exit_code

    def _answers(self, kind: str) -> bool:
        probe = self.container[f"{kind}Probe"]
        asked = probe.get("httpGet") or probe["tcpSocket"]
        ports = {each["name"]: each["containerPort"] for each in self.container["ports"]}
        port, seconds = ports[asked["port"]], probe.get("timeoutSeconds", 1)
        answered: bool = self._hosts.on(0, _is_answered, self.address, port, asked.get("path"), seconds).result()
        return answered

    def _environment(self) -> dict[str, str]:
        world = {}
        for each in self.container.get("envFrom", []):
            world |= self._secret(each["secretRef"]["name"])
        for each in self.container.get("env", []):
            value = each["value"] if "value" in each else self._look_up(each["valueFrom"])
            if value is not None:
                world[each["name"]] = _expand(value, world)
        return world

    def _look_up(self, source: dict[str, Any]) -> str | None:
        if field := source.get("fieldRef"):
            fields = {"metadata.name": self.name, "status.podIP": self.address}
            fields |= {f"metadata.annotations['{key}']": value for key, value in self._annotations.items()}
            return fields[field["fieldPath"]]
        key = source["secretKeyRef"]
        if key.get("optional") and ("Secret", key["name"]) not in self._objects:
            return None
        secret = self._secret(key["name"])
        return secret.get(key["key"]) if key.get("optional") else secret[key["key"]]

    def _secret(self, name: str) -> dict[str, str]:
        if ("Secret", name) not in self._objects:
            raise NotStartedError(f'secret "{name}" not found')
        secret = self._objects["Secret", name]
        data = {key: base64.b64decode(value).decode() for key, value in secret.get("data", {}).items()}
        return data | dict(secret.get("stringData", {}))

    def _mounts(self) -> list[tuple[str, str, bool]]:
        """Return what is mounted: its path here, its path there, and whether nobody may write there."""
        volumes = {each["name"]: each for each in self.spec["volumes"]}
        found = [(str(self._folder / "hosts"), "/etc/hosts", True)]
        for mount in self.container["volumeMounts"]:
            source = self._volume(volumes[mount["name"]]) / mount.get("subPath", "")
            found.append((str(source), mount["mountPath"], bool(mount.get("readOnly"))))
        return found

    def _volume(self, volume: dict[str, Any]) -> Path:
        if claim := volume.get("persistentVolumeClaim"):
            folder = self._folder.parent / str(claim["claimName"])
        else:
            folder = self._folder / "volumes" / str(volume["name"])
        folder.mkdir(parents=True, exist_ok=True)
        files: dict[str, str] = {}
        if source := volume.get("configMap"):
            files = self._objects["ConfigMap", source["name"]]["data"]
        elif source := volume.get("secret"):
            files = self._secret(source["secretName"])
        for name, text in files.items():
            (folder / name).write_text(text)
        return folder


def _expand(text: str, environment: dict[str, str]) -> str:
    """Put in what $(NAME) stands for, and leave what is unknown."""
    return re.sub(r"\$\((\w+)\)", lambda found: environment.get(found[1], found[0]), text)


def _is_answered(address: str, port: int, path: str | None, seconds: float) -> bool:
    try:
        if path is None:
            socket.create_connection((address, port), seconds).close()
            return True
        with urllib.request.urlopen(f"http://{address}:{port}{path}", timeout=seconds) as answer:
            return int(answer.status) < 400
    except OSError:  # which the answers 400 to 599 are, too
        return False


def _enter_pod(network: str, name: str, folder: str, mounts: list[tuple[str, str, bool]], cwd: str) -> None:
    """Move this process, which has one thread, into a network and onto a root of its own, where only volumes change.

    The root is an overlay of this machine's and, in a layer before it, of the paths at which volumes are mounted.
    """
    enter(name=network)
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS), "unshare")
    socket.sethostname(name)

    def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
        result = libc.mount(
            *(each.encode() for each in (source, target, kind)), ctypes.c_ulong(flags), options.encode()
        )
        _check(result, f"mount {source} on {target}")

    there = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    mount("", "/", flags=_REC | _PRIVATE)
    layer, root = f"{folder}/layer", f"{folder}/root"
    for path in (layer, root):
        os.makedirs(path)
    mount("tmpfs", layer, "tmpfs")  # a layer may not lie in another one
    for source, path, _ in mounts:
        point = Path(layer + path)
        if os.path.isdir(source):
            point.mkdir(parents=True, exist_ok=True)
        else:
            point.parent.mkdir(parents=True, exist_ok=True)
            point.touch()
    mount("overlay", root, "overlay", _RDONLY, f"lowerdir={layer}:/")
    for path in there:  # what else is mounted on this machine: /proc, /dev and so on
        if path != "/" and os.path.exists(root + path):
            mount(path, root + path, flags=_BIND)
    for source, path, is_fixed in mounts:
        mount(source, root + path, flags=_BIND)
        if is_fixed:
            mount("", root + path, flags=_BIND | _REMOUNT | _RDONLY)
    for path in (str(ROOT), sys.prefix):  # what would be in the image, and may lie below a volume: /tmp
        if not os.path.exists(root + path):
            os.makedirs(root + path)
            mount(path, root + path, flags=_BIND)
    os.chroot(root)
    os.chdir(cwd)


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
