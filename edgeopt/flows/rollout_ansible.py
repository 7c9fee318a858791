"""The same per-device work as an Ansible playbook: `edgeopt deploy` once a device, a play a wave.

Ansible runs each task here, for the device (`connection: local`), so the devices need nothing for it. A play is one
batch (`serial`), and ends the playbook where more than `max_fail_percentage` of it failed. Ansible has no counterpart
for taking the wave's other devices back, nor for engines that are shared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeopt.errors import HostError, LockedError, RolloutError, disk_error
from edgeopt.flows.rollout_plan import Plan, Planned
from edgeopt.spec.yaml_file import to_yaml

_HOST_STATUS, _LOCKED_STATUS = HostError.exit_code, LockedError.exit_code
_RETRIES, _DELAY_S = 3, 10
_SAID = "{{ deployed.stderr | default(deployed.msg, true) }}"


def write(folder: Path, plan: Plan, options: list[str]) -> tuple[Path, Path]:
    """(inventory, playbook), written to `folder`; `options` are further arguments of every `edgeopt deploy`."""
    files = {"inventory.yml": inventory(plan, options), "playbook.yml": playbook(plan)}
    paths = []
    for name, data in files.items():
        path = folder / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(to_yaml(data), encoding="utf-8")
        except OSError as why:
            raise disk_error(why, path, error=RolloutError) from None
        paths.append(path)
    return paths[0], paths[1]


def inventory(plan: Plan, options: list[str]) -> dict[str, Any]:
    """Every device with what its deployment needs, in the group of its wave."""
    waves = {
        f"wave_{at}": {"hosts": {name: _variables(plan, plan.device(name), options) for name in wave}}
        for at, wave in enumerate(plan.waves, 1)
    }
    return {"all": {"children": waves}}


def playbook(plan: Plan) -> list[dict[str, Any]]:
    """A play a wave; a device that is not reached does not count as failed unless the plan says so."""
    return [
        {
            "name": f"Wave {at} of {len(plan.waves)}: {plan.name}",
            "hosts": f"wave_{at}",
            "connection": "local",
            "gather_facts": False,
            "serial": len(wave),
            # it is compared with 'more than', and a share that is rounded down may not let one less fail
            "max_fail_percentage": round(100 * plan.max_failures / len(wave) + 1e-3, 3) if plan.max_failures else 0,
            # tasks run here: by the Python that runs Ansible, not by one that is looked for on the PATH
            "vars": {"edgeopt": "edgeopt", "ansible_python_interpreter": "{{ ansible_playbook_python }}"},
            "tasks": _tasks(plan, soak=at < len(plan.waves)),
        }
        for at, wave in enumerate(plan.waves, 1)
    ]


def _tasks(plan: Plan, *, soak: bool) -> list[dict[str, Any]]:
    passing = [0] if plan.count_offline else [0, _HOST_STATUS, _LOCKED_STATUS]
    deploy = {
        "name": "Push, prepare, validate and activate",
        "ansible.builtin.command": {
            "argv": "{{ [edgeopt, 'deploy', edgeopt_artifact, edgeopt_host] + edgeopt_options }}",
            "expand_argument_vars": False,  # a '~' is the device's, not ours; from ansible-core 2.16 on
        },
        "register": "deployed",
        "retries": _RETRIES,
        "delay": _DELAY_S,
        "until": f"deployed.rc not in [{_HOST_STATUS}, {_LOCKED_STATUS}]",
        "changed_when": "deployed.rc == 0",
        # a task whose tries are used up is failed, whatever failed_when says: the next one judges
        "ignore_errors": True,
    }
    judged = {
        "name": "Judge",
        "ansible.builtin.fail": {"msg": _SAID},
        "when": f"deployed.rc not in {passing}",
    }
    named = {
        "name": "Name what was not reached",
        "ansible.builtin.debug": {"msg": "{{ inventory_hostname }} was not reached: " + _SAID},
        "when": "deployed.rc != 0",
    }
    pause = {"name": "Soak", "ansible.builtin.pause": {"seconds": int(plan.soak_s)}, "run_once": True}
    return [deploy, judged, named, *([pause] if soak and plan.soak_s >= 1 else [])]


def _variables(plan: Plan, device: Planned, options: list[str]) -> dict[str, Any]:
    root = ["--root", device.root] if device.root else []
    own = [*root, "--python", device.python, "--keep", str(plan.keep), "--json", *options]
    return {
        "edgeopt_host": device.host, "edgeopt_artifact": plan.artifacts[device.digest], "edgeopt_options": own,
        "edgeopt_labels": device.labels,
    }  # fmt: skip
