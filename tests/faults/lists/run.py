"""Faults around a run: signals, exit codes, time limits, the launcher, Slurm."""

from titan.testing.faults import Fault

PREEMPTION = "tests/dist/test_preemption.py"
LAUNCH = "tests/dist/test_launch.py"

FAULTS = (
    Fault(
        "OpenMP's threads that spin while they wait",
        "titan/__init__.py",
        'os.environ.setdefault("GOMP_SPINCOUNT", "10000")',
        'os.environ.get("GOMP_SPINCOUNT", "10000")',
        ("tests/unit/test_launcher_imports.py::test_how_threads_wait_is_set_before_torch_is_imported",),
    ),
    Fault(
        "freed host memory given back after each step",
        "titan/resources.py",
        "mallopt(_MMAP_MAX, 0)",
        "pass",
        ("tests/unit/test_resources.py::test_a_rank_on_a_cpu_keeps_the_memory_that_it_frees[default]",),
    ),
    Fault(
        "a run that keeps no freed memory",
        "titan/training/build.py",
        "keep_freed_memory(rank.device)",
        "pass",
        ("tests/unit/test_resources.py::test_a_run_keeps_memory_once_it_is_built",),
    ),
    Fault(
        "a preemption signal lost",
        "titan/ranks/meeting/signals.py",
        "_noted.add(number)",
        "pass",
        (f"{PREEMPTION}::test_signals_are_noted_while_somebody_listens",),
    ),
    Fault(
        "a signal to one rank that the others do not hear of",
        "titan/ranks/preemption.py",
        "dist.ReduceOp.MAX, self._group, async_op=True",
        "dist.ReduceOp.MIN, self._group, async_op=True",
        (f"{PREEMPTION}::test_a_signal_to_one_rank[tp]",),
    ),
    Fault(
        "exit code 75 lost",
        "titan/train.py",
        "return EXIT_PREEMPTED",
        "return EXIT_DONE",
        (f"{PREEMPTION}::test_a_signal_to_one_rank[one]",),
    ),
    Fault(
        "exit code 75 although nothing was saved",
        "titan/train.py",
        '    if run.checkpointer is None:\n        log.log.error(f"{stopped}',
        '    if run.checkpointer is None:\n        return EXIT_PREEMPTED\n        log.log.error(f"{stopped}',
        (f"{PREEMPTION}::test_no_75_when_the_same_command_would_not_get_on",),
    ),
    Fault(
        "a time limit that is over at once",
        "titan/ranks/preemption.py",
        "60 * max_minutes if max_minutes",
        "1e-9 * max_minutes if max_minutes",
        (f"{PREEMPTION}::test_a_time_limit_that_is_never_reached",),
    ),
    Fault(
        "a watchdog that does not fire",
        "titan/ranks/watchdog.py",
        "    timer.start()\n",
        "    pass\n",
        ("tests/dist/test_watchdog.py::test_what_ends_in_time_goes_on",),
    ),
    Fault(
        "a watchdog that is never called off",
        "titan/ranks/watchdog.py",
        "timer.cancel()",
        "pass",
        ("tests/dist/test_watchdog.py::test_what_ends_in_time_goes_on",),
    ),
    Fault(
        "a watchdog that ends a hung run with exit code 0",
        "titan/ranks/watchdog.py",
        "os._exit(EXIT_FAILED)",
        "os._exit(0)",
        ("tests/dist/test_watchdog.py::test_a_rank_whose_limit_ends_later_shows_its_stacks_too",),
    ),
    Fault(
        "a launcher that leaves the ranks of a failed one running",
        "titan/ranks/rank_processes.py",
        "stack.callback(self._kill)",
        "stack.callback(self._processes.clear)",
        (f"{LAUNCH}::test_a_rank_that_outlives_a_failed_one_is_killed",),
    ),
    Fault(
        "ranks that outlive their launcher",
        "titan/ranks/rank_processes.py",
        "    _die_with(parent)\n",
        "",
        (f"{LAUNCH}::test_no_rank_outlives_its_launcher",),
    ),
    Fault(
        "a signal that the launcher does not pass on",
        "titan/ranks/rank_processes.py",
        "os.kill(process.pid, number)",
        "pass",
        (f"{LAUNCH}::test_a_signal_reaches_every_rank_once",),
    ),
    Fault(
        "a rank that failed because of another blamed",
        "titan/ranks/launcher.py",
        "cause = (killed or failed)[0]",
        "cause = failed[0]",
        (f"{LAUNCH}::test_says_which_rank_is_the_cause",),
    ),
    Fault(
        "wrong input reported as a failure, which would be restarted",
        "titan/ranks/launcher.py",
        "return EXIT_WRONG_INPUT if cause.code == EXIT_WRONG_INPUT else EXIT_FAILED",
        "return EXIT_FAILED",
        (f"{LAUNCH}::test_exit_codes",),
    ),
    Fault(
        "a cancelled Slurm job requeued",
        "titan/ranks/slurm.py",
        "if number != signal.SIGUSR1",
        "if number < 0",
        ("tests/unit/test_slurm.py::test_a_job_that_is_cancelled_is_not",),
    ),
    Fault(
        "a whole job array requeued for one of its tasks",
        "titan/ranks/slurm.py",
        'if env.get("SLURM_ARRAY_JOB_ID") == job else job',
        'if env.get("SLURM_ARRAY_JOB_ID") == "" else job',
        ("tests/unit/test_slurm.py::test_a_task_of_an_array_has_a_name_of_its_own",),
    ),
    Fault(
        "rows beyond the checkpoint kept on resume",
        "plugins/trackers/jsonl.py",
        "if _step_of(line) <= last]",
        "if _step_of(line) < math.inf]",
        ("tests/unit/test_trackers.py::test_resuming_drops_rows_beyond_the_checkpoint",),
    ),
)
