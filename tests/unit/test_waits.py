"""No wait without a limit and a reason: the list of all waits for another process, host or thread.

Waits in collectives are not listed: their process group has the limit (`[comm]`). Nor are reads of files: a thread of
`titan.ranks.watchdog` or of the data loader looks at the clock where a run depends on them.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CALLS = {"TCPStore", "accept", "acquire", "communicate", "connect", "create_connection", "getaddrinfo"}
CALLS |= {"multi_get", "poll", "recv", "recv_bytes", "rendezvous", "result", "urlopen", "wait"}
SHARED = {"get", "join", "run"}
"""Names that dictionaries, strings and others have too: without an argument they wait, and of these objects."""
OBJECTS = ("store", "process", "subprocess", "thread", "heart")


def waits(tree: ast.AST, function: str = "") -> Iterator[str]:
    """Each wait of a file, as "function: call"."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Call) and _waits(child):
            yield f"{function}: {ast.unparse(child.func)}"
        yield from waits(child, child.name if isinstance(child, ast.FunctionDef) else function)


def _waits(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Name):
        return call.func.id in CALLS
    if not isinstance(call.func, ast.Attribute):
        return False
    of = ast.unparse(call.func.value).rpartition(".")[2].lstrip("_")
    return call.func.attr in CALLS or (call.func.attr in SHARED and (not call.args or of in OBJECTS))


OWN = "no wait: a method of this name, or of PyTorch's on the device"
SAVE = "comm.checkpoint_timeout_s, which the watchdog of each save and load keeps"
GROUP = "that of the process group, [comm]"
STORE = "that of the store, comm.init_timeout_s; the key is there by then"
CHILD = "none: the child lives as long as its work, and is killed by then"
TEST = "that of the test"

LISTED = {
    "titan/checkpoint/checkpointer.py": {
        "load: self.wait": SAVE, "save: self.wait": SAVE, "go_on_with: self.wait": SAVE, "close: self.wait": SAVE,
        "connect: self._ranks.connect": GROUP, "wait: self._writer.join": SAVE,
        "_end_removal: self._sweeper.join": SAVE,
    },
    "titan/ranks/folder_lock.py": {"release: heart.join": "BEAT_S", "_beat: self._done.wait": "BEAT_S"},
    "titan/checkpoint/ranks.py": {"leave: late.wait": "1 ms", "go_on_with: self.connect": GROUP},
    "titan/checkpoint/disk/tensor_file.py": {"write: self._hashing.result": SAVE},
    "inference/commands/eval.py": {"_evaluate: process.join": "comm.init_timeout_s"},
    "inference/commands/generate.py": {"_generate: process.join": "comm.init_timeout_s"},
    "titan/contracts/host.py": {"allocating_on_host: _allocating.get": OWN},
    "titan/data/samples/loader.py": {
        "_read: wait": "1 s, for a process that is dying", "take: self._answers.get": "LOOK_S; `limits` in `_read`",
        "_serve: self._requests.get": "none: a thread that is asked, and ends when the loader is closed",
    },
    "titan/data/tokens/processes.py": {"watch: parent.join": "none: a thread that ends with the process it is for"},
    "titan/data/tokens/tokenize.py": {
        "tokenize: each.result": "none: it is done", "tokenize: wait": "LOOK_S; text of any size, and signals end it",
    },
    "titan/machine.py": {"kind_of: _stands_for.get": OWN},
    "planner/doctor/links.py": {"sends: dist.recv": GROUP, "answers: dist.recv": GROUP},
    "planner/search/best_first.py": {
        "_shared_out: receiver.recv": CHILD + "; one that dies closes the pipe", "_shared_out: process.join": CHILD,
    },
    "titan/ranks/failure.py": {"_get: store.get": STORE},
    "titan/ranks/meeting/launch_env.py": {"_hosts: subprocess.run": "SCONTROL_S"},
    "titan/ranks/meeting/store.py": {
        "in_time: wait": "LOOK_S, `limit_s` around it; LEFT_S in the end", "in_time: answer.result": "0 s",
        "check_host: socket.getaddrinfo": "RESOLVE_S",
        "_connect: TCPStore": "comm.init_timeout_s, by `in_time`", "await_port: socket.create_connection": "`deadline`",
    },
    "titan/ranks/preemption.py": {"due: self._asked.wait": GROUP},
    "titan/ranks/process.py": {"assemble: store.get": STORE, "_compare: store.get": STORE},
    "titan/ranks/rank_processes.py": {
        "_wait: self.expendable.connect": "ANSWER_S",
        "_wait: connection.wait": "none while the ranks run; GRACE_S after one has failed",
        "_hear_ranks: self._told.poll": "0 s", "_hear_ranks: self._told.recv_bytes": "none: there is something",
        "_live: TCPStore": "none: it serves", "_connect: TCPStore": "ANSWER_S, as `Expendable.lose` asks",
        "_connect: socket.create_connection": "the same",
    },
    "titan/ranks/meeting/caller.py": {"read: self.link.recv": "none: it does not block; HELLO_S in `Gathering._look`"},
    "titan/ranks/meeting/rendezvous.py": {
        "_look: wait": "LOOK_S",
        "_look: server.accept": "none: it does not block; comm.init_timeout_s in `gather`",
        "_join: socket.create_connection": "HELLO_S; comm.init_timeout_s around it", "_is_taken: link.poll": "LOOK_S",
        "await_word: self.links[node].poll": "LOOK_S; until node 0 has all nodes, comm.init_timeout_s",
        "_read: link.recv_bytes": "none while a run lives; keepalive notices a host that is gone",
    },
    "titan/ranks/meeting/slurm.py": {"requeue: subprocess.run": "ANSWER_S"},
    "titan/ranks/turns.py": {
        "beat: done.wait": "BEAT_S", "at_work: thread.join": "BEAT_S", "over: self._store.get": STORE,
        "_part: self._store.wait": "FAREWELL_S",
    },
    "testing/faults.py": {"run_tests: process.wait": TEST},
    "testing/jobs.py": {"trained: process.join": TEST},
    "testing/ranks.py": {
        "answer: self.inbox.poll": "0 s", "answer: self.inbox.recv": "none: there is something",
        "run_ranks: TCPStore": "none: it serves", "_collect: wait": TEST, "_collect: rank.process.join": TEST,
        "_end: rank.process.join": "none: it was killed", "_death: rank.process.join": "none: it has closed its pipe",
        "_stacks: rank.process.join": TEST, "watch: wait": "none: a thread that ends with the process it is for",
    },
    "titan/train.py": {"_built: process.join": "comm.init_timeout_s"},
    "titan/training/build.py": {"_restore: checkpointer.connect": GROUP},
    "titan/training/pace.py": {"_agreed: store.get": STORE, "due: self._asked.wait": GROUP},
    "titan/training/trainer.py": {"_finish: run.checkpointer.wait": SAVE, "_rescue: run.checkpointer.wait": SAVE},
    "planner/tuning/trial.py": {
        "_live: process.communicate": "--timeout", "_end: process.poll": "0 s", "_end: process.communicate": "GRACE_S",
    },
    "plugins/attention/cpu_kernel.py": {"_answer: subprocess.run": "its own, in seconds"},
    "plugins/memory/offload/activations.py": {
        "left: self.offloader.to_host.wait": OWN, "came: self.offloader.to_device.wait": OWN,
    },
    "plugins/memory/offload/state.py": {"_wait: self._out.wait": OWN, "_for_each_bucket: self._in.wait": OWN},
    "plugins/parallel/gossip.py": {"_average: work.wait": GROUP},
    "plugins/parallel/parameter_server/server.py": {
        "receive: dist.recv": GROUP, "close: thread.join": "JOIN_S", "answer: self._answers.get": "`limit_s`",
        "do: self._arrived[worker].get": "none: a thread; whom it serves waits for `limit_s`",
        "_decided: self._inbox.get": "`limit_s` while the server waits; none before, as above",
        "received: work.wait": "`limit_s`",
    },
    "plugins/parallel/pipeline/engine.py": {"forward: dist.recv": GROUP, "_exchange: dist.recv": GROUP},
}  # fmt: skip
"""File -> its waits, as "function: call" -> the limit of each, or the reason why it has none."""


def test_every_wait_is_listed_with_its_limit_or_reason() -> None:
    files = [
        file for room in ("titan", "plugins", "planner", "inference", "testing") for file in (ROOT / room).rglob("*.py")
    ]
    present = {(str(file.relative_to(ROOT)), wait) for file in files for wait in waits(ast.parse(file.read_text()))}
    listed = {(file, wait) for file, calls in LISTED.items() for wait in calls}
    assert present - listed == set(), "give each a limit, and say which, or why it needs none"
    assert listed - present == set(), "these are gone"


def test_a_wait_is_found() -> None:
    code = "def f(q, t):\n    q.get()\n    t.join()\n    d.get('x')\n    ', '.join(x)\n    self._store.get('x')\n"
    assert list(waits(ast.parse(code))) == ["f: q.get", "f: t.join", "f: self._store.get"]
