"""Faults of how ranks and launchers find together, and of how they wait."""

from titan.testing.faults import Fault

NODES = "tests/dist/test_rendezvous.py"
SAME = "tests/dist/test_same_job.py"
WAITING = "tests/dist/test_waiting.py"
DATA = "tests/dist/test_data_processes.py"

FAULTS = (
    Fault(
        "nodes that do not compare their jobs",
        "titan/ranks/meeting/same_job.py",
        "_by_option(differences(ours.job, theirs.job))",
        "_by_option(())",
        (f"{NODES}::test_nodes_that_do_not_fit_are_refused_on_both[a key]",),
    ),
    Fault(
        "what a host may choose is compared",
        "titan/ranks/meeting/same_job.py",
        '("data", "workers"), ',
        "",
        (f"{SAME}::test_every_key_is_compared_but_for_those_of_hosts",),
    ),
    Fault(
        "the run's folder taken for a path of the host",
        "titan/ranks/meeting/same_job.py",
        'frozenset({("run", "dir"), ',
        "frozenset({",
        (f"{SAME}::test_every_key_is_compared_but_for_those_of_hosts",),
    ),
    Fault(
        "plugins that differ between nodes",
        "titan/ranks/meeting/same_job.py",
        "not in (None, wanted)",
        "in ()",
        (f"{NODES}::test_nodes_that_do_not_fit_are_refused_on_both[a plugin]",),
    ),
    Fault(
        "a plugin known by its name alone",
        "titan/ranks/meeting/same_job.py",
        'b"\\0" + file.read_bytes() + b"\\0"',
        'b"\\0"',
        (f"{SAME}::test_ranks_with_other_files_of_a_plugin_are_refused",),
    ),
    Fault(
        "versions of PyTorch that differ between nodes",
        "titan/ranks/meeting/same_job.py",
        "if minors[0] != minors[1]:",
        "if False:",
        (f"{NODES}::test_nodes_that_do_not_fit_are_refused_on_both[PyTorch]",),
    ),
    Fault(
        "a launcher of another run ends this one",
        "titan/ranks/meeting/rendezvous.py",
        "if other_run(theirs, self._statement):",
        "if False:",
        (f"{NODES}::test_a_launcher_of_another_run_is_refused_alone",),
    ),
    Fault(
        "a stranger at the port ends the run",
        "titan/ranks/meeting/rendezvous.py",
        "        except UnknownCallerError:\n            self._ignore(caller)\n            return\n",
        '        except UnknownCallerError:\n            raise NodeLostError("a stranger") from None\n',
        (f"{NODES}::test_strangers_end_nothing_and_keep_nobody",),
    ),
    Fault(
        "a caller that says nothing is kept",
        "titan/ranks/meeting/rendezvous.py",
        "if time.monotonic() > caller.deadline",
        "if False",
        (f"{NODES}::test_a_caller_that_says_nothing_is_let_go",),
    ),
    Fault(
        "a node that has left is counted",
        "titan/ranks/meeting/rendezvous.py",
        "self._links.items() if link in ready]",
        "self._links.items() if False]",
        (f"{NODES}::test_a_node_that_leaves_before_all_have_come_is_waited_for_again",),
    ),
    Fault(
        "ranks that do not compare their jobs",
        "titan/ranks/process.py",
        "    if sentences:\n        store",
        "    if False:\n        store",
        (f"{SAME}::test_a_rank_with_another_seed_ends_all",),
    ),
    Fault(
        "two ranks of one number",
        "titan/ranks/process.py",
        'if store.compare_set(f"here {rank}", "", token).decode() != token:',
        "if False:",
        (f"{SAME}::test_what_is_not_of_the_run_is_refused_alone",),
    ),
    Fault(
        "a rank of another run ends this one",
        "titan/ranks/process.py",
        "if other_run(ours, theirs):",
        "if False:",
        (f"{SAME}::test_what_is_not_of_the_run_is_refused_alone",),
    ),
    Fault(
        "ranks that decide by their own memory",
        "titan/training/foresight.py",
        "from_first(lambda: choose(job, device_gib), rank)",
        "choose(job, device_gib)",
        (f"{SAME}::test_what_memory_decides_is_rank_0s_to_decide",),
    ),
    Fault(
        "a signal unheard while nodes wait",
        "titan/ranks/meeting/signals.py",
        "if _noted and _Raising.activity:",
        "if False:",
        (f"{NODES}::test_a_signal_while_nodes_wait[requeued]",),
    ),
    Fault(
        "every node has the job run again",
        "titan/ranks/meeting/rendezvous.py",
        "    if place.node == 0:\n        slurm.requeue",
        "    if True:\n        slurm.requeue",
        (f"{NODES}::test_a_signal_while_nodes_wait[another node]",),
    ),
    Fault(
        "a signal unheard while data do not come",
        "titan/data/samples/loader.py",
        "if heard and waited > heard + PATIENCE_S:",
        "if False:",
        (f"{DATA}::test_a_signal_ends_the_wait_for_data",),
    ),
    Fault(
        "batches in shared memory",
        "titan/data/samples/loader.py",
        "return _Sent(read) if sent else read",
        "return read",
        (f"{DATA}::test_batches_of_processes_need_no_shared_memory",),
    ),
    Fault(
        "a rank whose data do not come ends unsaved",
        "titan/training/trainer.py",
        "        if run.rank.world_size == 1 and run.step > run.saved:\n            return None\n",
        "",
        (f"{WAITING}::test_the_only_rank_saves_when_data_do_not_come",),
    ),
    Fault(
        "a preempted run that counts as failed",
        "titan/ranks/launcher.py",
        "if code == EXIT_FAILED and children.stopped and not children.missed:",
        "if False:",
        (f"{WAITING}::test_one_of_two_ranks_ends_the_run_when_its_data_do_not_come",),
    ),
)
