"""Training on several devices and in several processes: one all-reduce a step, the same losses, one writer, and nobody is left behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from elastic_jax.checkpoints import RunDirectory
from elastic_jax.processes import join_processes
from elastic_jax.trainer import data_mesh, init_state, make_train_step, replicate, shard_batch
from elastic_jax.training_loop import read_metrics
from tests.test_programs import command, workshop  # noqa: F401
from tests.test_trainer import CONFIG, loop
from tests.tiny import SyntheticPacks, tiny_model

LAUNCHER = Path(__file__).parents[1] / "experiments" / "launch_node.sh"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(program, number, count, port, devices=1, arguments=()):
    """One of `count` processes of a program."""
    names = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": count, "JAX_PROCESS_ID": number}
    environment = os.environ | {name: str(value) for name, value in (names | {"JAX_NUM_CPU_DEVICES": devices}).items()}
    arguments = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    return subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def collectives(text):
    """(name, elements) of each collective of a compiled program; f32 alone."""
    names = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
    found = re.findall(rf"= (\S.*?) ({names})(?:-start)?\(", text)
    sizes = [[int(np.prod([int(n) for n in dims.split(",") if n] or [1])) for dims in re.findall(r"f32\[([\d,]*)\]", s)] for s, _ in found]
    return [(name, sum(size)) for (_, name), size in zip(found, sizes)]


def check_collectives(devices):
    """The step's only collective is one sum of the trainable arrays' gradients and the metrics, far less than the backbone."""
    model, backbone = tiny_model(implementation="xla")
    mesh = data_mesh(devices)
    step, state = make_train_step(model, CONFIG, mesh), replicate(init_state(model, CONFIG), mesh)
    batch = shard_batch(SyntheticPacks().batch(0, CONFIG.micro_batches(len(devices))), mesh)
    compiled = step.lower(state, replicate(backbone, mesh), batch).compile()
    trained = sum(x.size for x in jax.tree.leaves(state.trainable))
    metrics = 2 + 4 * 5  # two losses, and by class: documents, sparsity, penalty, entropy
    assert collectives(compiled.as_text()) == [("all-reduce", trained + metrics)]
    assert all(x.is_fully_replicated for x in jax.tree.leaves(compiled.output_shardings))


def test_a_step_has_one_all_reduce_of_the_routers_gradients():
    """In a process of its own: the number of CPU devices is fixed when JAX starts."""
    program = """
        import jax
        jax.config.update("jax_num_cpu_devices", 4)
        from tests.test_processes import check_collectives
        check_collectives(jax.devices())
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=300, check=True)


@pytest.mark.gpu
def test_a_step_on_two_gpus_has_one_all_reduce_and_the_losses_of_one_gpu():
    if len(devices := jax.devices()) < 2 or jax.default_backend() != "gpu":
        pytest.skip("two GPUs are needed")
    check_collectives(devices[:2])
    model, backbone = tiny_model(implementation="xla")
    losses = []
    for count in (1, 2):
        mesh = data_mesh(devices[:count])
        step, state, copies = make_train_step(model, CONFIG, mesh), replicate(init_state(model, CONFIG), mesh), replicate(backbone, mesh)
        for number in range(3):
            batch = shard_batch(SyntheticPacks().batch(number, CONFIG.micro_batches(count)), mesh)
            state, metrics = step(state, copies, batch)
            losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[3:], losses[:3], rtol=1e-4)


PROGRAM = """
    import json, pathlib, sys
    import jax
    from elastic_jax.processes import check_same, in_first, join_processes
    join_processes(timeout=200)
    from elastic_jax.checkpoints import RunDirectory
    from elastic_jax.trainer import data_mesh, replicate
    from elastic_jax.training_loop import train
    from tests.test_trainer import CONFIG, StopsAt
    from tests.tiny import SyntheticPacks, tiny_model

    out, said = pathlib.Path(sys.argv[1]), []
    assert (jax.process_count(), len(jax.devices()), len(jax.local_devices())) == (2, 4, 2)
    model, backbone = tiny_model()
    mesh, number = data_mesh(), jax.process_index()
    for packs in (StopsAt(3) if number == 1 else SyntheticPacks(), SyntheticPacks()):
        with RunDirectory(out, keep=1) as run:
            run.claim({"seed": CONFIG.seed})
            state, complete = train(model, replicate(backbone, mesh), packs, CONFIG, run, mesh, tokens_per_pack=128, checkpoint_every=10)
            said.append([int(state.step), complete, run.latest_step])
            try:
                run.claim({"seed": 0})
            except ValueError as error:
                said.append("other settings" in str(error))
    try:
        check_same("their number", str(number))
    except ValueError as error:
        said.append(str(error))
    said.append(in_first(lambda: number))
    out.with_name(f"said{number}").write_text(json.dumps(said))
"""


def test_two_processes_train_as_one_device_does_and_stop_together(tmp_path):
    """A signal that one of them gets ends both after the same step; the run goes on from the checkpoint that both wrote."""
    loop(tmp_path / "one")
    port = free_port()
    both = [start(PROGRAM, number, 2, port, devices=2, arguments=[tmp_path / "two"]) for number in range(2)]
    errors = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    for number, first in enumerate((0, None)):
        said = json.loads((tmp_path / f"said{number}").read_text())
        differ = "processes 0 and 1 differ in their number: all need the same flags, the same files and the same folder"
        assert said == [[3, False, 3], True, [4, True, 4], True, differ, first]
    one, two = read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two")
    assert [record["step"] for record in two] == [0, 1, 2, 3]
    for name in ("loss", "lm_loss", "penalty", "grad_norm"):
        np.testing.assert_allclose([record[name] for record in two], [record[name] for record in one], rtol=1e-4)
    model, _ = tiny_model()
    with RunDirectory(tmp_path / "one") as a, RunDirectory(tmp_path / "two") as b:
        mesh = data_mesh(jax.devices()[:1])
        states = [run.load(init_state(model, CONFIG), mesh) for run in (a, b)]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), *(state.trainable for state in states))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"JAX_PROCESS_ID": None}, "JAX_PROCESS_ID is not set, but JAX_COORDINATOR_ADDRESS is"),
        ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES=two: a whole number is needed"),
        ({"JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID=2: accepted are 0 to 1, since JAX_NUM_PROCESSES=2"),
        ({"JAX_COORDINATOR_ADDRESS": "10.0.0.1"}, "accepted is the host and port of process 0"),
        ({"JAX_COORDINATOR_ADDRESS": "127.0.0.1:99999"}, "accepted is the host and port of process 0"),
        ({"JAX_NUM_PROCESSES": "0"}, "JAX_NUM_PROCESSES=0: at least 1"),
    ],
)
def test_what_does_not_tell_who_a_process_is_is_refused(monkeypatch, changes, message):
    given = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}
    for name, value in (given | changes).items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        join_processes()


@pytest.mark.parametrize("number", [0, 1])
def test_a_process_that_is_alone_gives_up_with_one_line(number):
    program = "from elastic_jax.processes import join_processes; join_processes(timeout=2)"
    port = free_port()
    process = start(program, number, 2, port)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1
    assert f"error: process {number} of 2, coordinator 127.0.0.1:{port}: not all processes were there within 2 s\n" in err


def launch(arguments, **environment):
    """In a process group of its own, as a shell gives it."""
    names = {name: value for name, value in os.environ.items() if name not in ("PROCESSES", "NODES", "NODE_RANK", "COORDINATOR")}
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    return subprocess.Popen([LAUNCHER, *arguments], env=names | {"PYTHON": sys.executable} | environment, **options)


def test_the_launcher_trains_in_two_processes(workshop):  # noqa: F811
    process = launch(["train", *command(workshop, workshop / "launched", steps=2)[3:]], PROCESSES="2", JAX_PLATFORMS="cpu")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out.count("trained: checkpoint of step 2") == 1
    assert [record["step"] for record in read_metrics(workshop / "launched")] == [0, 1]
    # Folders that are not the same one are told before the first step.
    wrapper = workshop / "python"
    wrapper.write_text(f'#!/bin/bash\nexec {sys.executable} "$@" --out={workshop}/own$JAX_PROCESS_ID\n')
    wrapper.chmod(0o755)
    arguments = ["train", *command(workshop, workshop / "unshared", steps=2)[3:]]
    process = launch(arguments, PROCESSES="2", JAX_PLATFORMS="cpu", PYTHON=str(wrapper))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert re.search(r"error: processes 0 and 1 differ in what they find in .*own\d: all need .* the same folder", err)
    assert "Traceback" not in err
    # Batches of different shapes would use some packs twice.
    wrapper.write_text(f'#!/bin/bash\nexec {sys.executable} "$@" --packs_per_device=$((1 + ${{JAX_PROCESS_ID:-0}}))\n')
    process = launch([*arguments, "--global_batch=4"], PROCESSES="2", JAX_PLATFORMS="cpu", PYTHON=str(wrapper))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "error: processes 0 and 1 differ in their settings" in err


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {}, "usage: "),
        (["train"], {"PROCESSES": "0"}, "PROCESSES=0: at least 1"),
        (["train"], {"PROCESSES": "all"}, "PROCESSES=all: a whole number"),
        (["train"], {"PROCESSES": "002", "CUDA_VISIBLE_DEVICES": "0,1,2", "JAX_PLATFORMS": ""}, "PROCESSES=2 does not divide the 3 GPUs"),
        (["train"], {"NODES": "2"}, "COORDINATOR is not set"),
        (["train"], {"NODES": "2", "NODE_RANK": "2", "COORDINATOR": "a:1"}, "NODE_RANK=2: accepted are 0 to 1"),
        (["evaluate"], {"PROCESSES": "2"}, "evaluate runs in one process"),
    ],
)
def test_the_launcher_refuses_in_one_line(arguments, environment, message):
    process = launch(arguments, **environment)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert message in err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1


@pytest.fixture
def stand_in(tmp_path):
    """Instead of Python: process 1 does what its flag says, the others wait."""
    file = tmp_path / "python"
    file.write_text(
        "#!/bin/bash\n"
        "trap 'echo saved; exit 0' TERM\n"
        'echo "$JAX_PROCESS_ID of $JAX_NUM_PROCESSES at $JAX_COORDINATOR_ADDRESS on $JAX_LOCAL_DEVICE_IDS: $*"\n'
        "if [[ $4 == fail* && $JAX_PROCESS_ID == 3 ]]; then exit 7; fi\n"
        "if [[ $4 == fail-abort ]]; then sleep 0.5; kill -ABRT $$; fi\n"
        "if [[ $4 == abort ]]; then kill -ABRT $$; fi\n"
        "for i in {1..600}; do sleep 0.1; done\n"
    )
    file.chmod(0o755)
    return {
        "PYTHON": str(file),
        "PROCESSES": "2",
        "NODES": "2",
        "NODE_RANK": "01",
        "JAX_PLATFORMS": "",
        "COORDINATOR": "node0:1234",
        "CUDA_VISIBLE_DEVICES": "4,5,6,7",
    }


def test_a_failure_ends_the_others_with_its_status(stand_in):
    process = launch(["train", "fail"], **stand_in)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 7
    assert "a process ended with status 7: ending the other 1" in err
    assert sorted(out.splitlines()) == [
        "2 of 4 at node0:1234 on 0,1: -m experiments.train --distributed fail",
        "3 of 4 at node0:1234 on 2,3: -m experiments.train --distributed fail",
    ]


@pytest.mark.parametrize(("what", "status"), [("fail-abort", 7), ("abort", 128 + signal.SIGABRT)])
def test_processes_that_die_of_signals_end_the_launcher(stand_in, what, status):
    """JAX aborts in all processes when one is gone."""
    process = launch(["train", what], **stand_in)
    _, err = process.communicate(timeout=30)
    assert process.returncode == status
    assert len(err.splitlines()) < 10


def test_one_process_is_started_as_it_is(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\necho "$@"\n')
    python.chmod(0o755)
    out, _ = launch(["evaluate", "--suite=ruler"], PYTHON=str(python)).communicate(timeout=30)
    assert out == "-m experiments.evaluate --suite=ruler\n"


def test_a_port_that_is_taken_is_named(monkeypatch):
    with socket.create_server(("", 0)) as taken:
        for name, value in zip(("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID"), (f"a:{taken.getsockname()[1]}", "2", "0")):
            monkeypatch.setenv(f"JAX_{name}", value)
        with pytest.raises(ValueError, match=r"JAX_COORDINATOR_ADDRESS=a:\d+: process 0 cannot listen there .* give a free port"):
            join_processes()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("reaches", [os.kill, os.killpg])  # the launcher, or all processes, as a terminal's Ctrl-C does
def test_a_signal_reaches_all(stand_in, number, reaches):
    process = launch(["train", "wait"], **stand_in)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]
    assert all(" of 4 at " in line for line in lines)
    reaches(process.pid, number)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert set(out.splitlines()) == {"saved"}


def test_several_signals_are_one(stand_in):
    """The status is that of the processes, and their saving is waited for."""
    python = Path(stand_in["PYTHON"])
    python.write_text(python.read_text().replace("echo saved", "sleep 1; echo saved"))
    process = launch(["train", "wait"], **stand_in)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]
    assert all(" of 4 at " in line for line in lines)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        os.kill(process.pid, number)
        time.sleep(0.02)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert out.splitlines() == ["saved"] * 2


def test_ctrl_c_after_a_failure_leaves_nobody(stand_in):
    process = launch(["train", "fail"], **stand_in)
    assert process.stderr is not None
    assert "ending the other 1" in process.stderr.readline()
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=30)  # until nobody holds its pipes; who waits does for 60 seconds
    assert process.returncode == 7
