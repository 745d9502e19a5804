"""Faults of saving, loading and resuming, and of reading untrusted files."""

from tests.faults.fault import Fault

FOLDER = "tests/unit/test_checkpoint_folder.py"
BITS = "tests/dist/test_resume.py::test_on_the_same_layout_bit_for_bit[-]"
SYNC = "tests/unit/test_checkpoint_sync.py::test_what_is_synced_before_and_after_a_checkpoint_gets_its_name"
PICKLES = "tests/unit/test_untrusted_checkpoints.py::test_pickles_in_place_of_the_metadata"

FAULTS = (
    Fault(
        "random state not restored",
        "titan/training/build.py",
        'if "rng" in rest:',
        "if False:",
        ("tests/dist/test_replicas.py::test_default_generators_go_on_where_they_were",),
    ),
    Fault(
        "state of techniques not restored",
        "titan/training/build.py",
        'technique.load_state_dict(rest.get("techniques", {}).get(technique.name, {}))',
        "technique.load_state_dict({})",
        ("tests/dist/test_technique_state.py::test_on_the_same_layout_bit_for_bit",),
    ),
    Fault(
        "AdamW's count of steps not restored",
        "titan/checkpoint/restore.py",
        "if name.startswith(OPTIMIZER) and parameter in updated:",
        'if name.startswith(OPTIMIZER) and parameter in updated and slot != "step":',
        (BITS,),
    ),
    Fault(
        "optimizer state of the wrong shard",
        "titan/checkpoint/storage.py",
        "values = values.narrow(dim, begin - theirs, count)",
        "values = values.narrow(dim, 0, count)",
        ("tests/dist/test_checkpoint.py::test_saved_on_one_layout_loads_bit_equal_on_another[(1, 4, 1)]",),
    ),
    Fault(
        "a save by the plan of other tensors",
        "titan/checkpoint/storage.py",
        "if not all(ranks.gather(table == self._table)):",
        "if self._table is None:",
        ("tests/dist/test_save_plan.py::test_a_save_is_planned_again_only_when_tensors_change",),
    ),
    Fault(
        "a rank that writes chunks of another rank",
        "titan/checkpoint/disk/plan.py",
        "chosen = order[np.cumsum(holders) - holders]",
        "chosen = order[: len(holders)]",
        ("tests/unit/test_checkpoint_index.py::test_each_chunk_is_written_once_by_a_rank_that_holds_it",),
    ),
    Fault(
        "two chunks of an index in the same bytes accepted",
        "titan/checkpoint/disk/index.py",
        "    if len(shared):",
        "    if False:",
        ("tests/unit/test_untrusted_checkpoints.py::test_index_that_says_something_else[bytes for all tensors]",),
    ),
    Fault(
        "a background save of weights that training has changed since",
        "titan/checkpoint/state.py",
        "return replace(snapshot, local=self.buffers)",
        "return snapshot",
        ("tests/unit/test_checkpoint.py::test_background_save_holds_the_values_of_its_step",),
    ),
    Fault(
        "a tied head loaded into one of its copies",
        "titan/checkpoint/restore.py",
        "other.copy_(first)",
        "pass",
        ("tests/dist/test_init_from.py::test_both_copies_of_a_tied_head_on_one_rank[before]",),
    ),
    Fault(
        "a checkpoint committed before its files are synced",
        "titan/checkpoint/disk/plain.py",
        "os.fsync(file.fileno())",
        "pass",
        (SYNC,),
    ),
    Fault(
        "a checkpoint renamed before its folder is synced",
        "titan/checkpoint/disk/folder.py",
        "    sync_folder(path)\n",
        "",
        (SYNC,),
    ),
    Fault(
        "the name of a checkpoint not synced",
        "titan/checkpoint/disk/folder.py",
        "    sync_folder(final.parent)\n",
        "",
        (SYNC,),
    ),
    Fault(
        "`.tmp` counted as complete",
        "titan/checkpoint/disk/folder.py",
        '_STEP = re.compile(r"step-\\d{8}", re.ASCII)',
        '_STEP = re.compile(r"step-\\d{8}(\\.tmp)?", re.ASCII)',
        (f"{FOLDER}::test_unfinished_and_foreign_folders_are_not_complete",),
    ),
    Fault(
        "a checkpoint that lacks a file counted as complete",
        "titan/checkpoint/disk/folder.py",
        "for name in (METADATA, STATE, MANIFEST) if not",
        "for name in (METADATA, STATE) if not",
        (f"{FOLDER}::test_unfinished_and_foreign_folders_are_not_complete",),
    ),
    Fault(
        "a damaged checkpoint chosen",
        "titan/checkpoint/disk/manifest.py",
        "if found != written:",
        "if False:",
        ("tests/unit/test_checkpoint_damage.py::test_resume_goes_back_to_the_newest_sound_one_and_says_so",),
    ),
    Fault(
        "the newest checkpoint by step, not by commit",
        "titan/checkpoint/disk/folder.py",
        "return sorted(found), damaged",
        "return sorted(found, key=lambda pair: pair[1]), damaged",
        (f"{FOLDER}::test_order_is_that_of_commits_not_of_steps",),
    ),
    Fault(
        "the newest checkpoints deleted, the oldest kept",
        "titan/checkpoint/disk/folder.py",
        "sound[:-keep] if keep > 0",
        "sound[keep:] if keep > 0",
        (f"{FOLDER}::test_retention_keeps_the_newest_complete",),
    ),
    Fault(
        "damaged checkpoints counted among those kept",
        "titan/checkpoint/disk/folder.py",
        "if path not in damaged]",
        "]",
        (f"{FOLDER}::test_retention_neither_counts_nor_removes_the_damaged",),
    ),
    Fault(
        "a lock that is not looked at",
        "titan/checkpoint/disk/lock.py",
        "        if alive:\n",
        "        if False:\n",
        ("tests/unit/test_lock.py::test_a_second_start_is_refused_while_the_first_lives",),
    ),
    Fault(
        "a checkpoint of another model taken",
        "titan/checkpoint/resume.py",
        "if _in(change, FIXED)",
        "if False",
        ("tests/unit/test_resume.py::test_another_model_is_refused",),
    ),
    Fault(
        "a pickle that names any function accepted",
        "titan/checkpoint/disk/unpickle.py",
        "or full not in self.known:",
        "or False:",
        (PICKLES,),
    ),
    Fault(
        "an unknown pickle opcode skipped",
        "titan/checkpoint/disk/unpickle.py",
        "            if act is None:\n",
        "            if act is None and (act := lambda machine: None) is None:\n",
        (PICKLES,),
    ),
    Fault(
        "a path out of the folder in a safetensors index accepted",
        "titan/checkpoint/disk/tensor_files.py",
        '".." in Path(name).parts or Path(name).is_absolute() or not any(map(path.is_relative_to, allowed))',
        "False",
        ("tests/unit/test_huggingface.py::test_an_index_leads_nowhere_else",),
    ),
    Fault(
        "a transposed Hugging Face tensor read as it stands",
        "titan/checkpoint/huggingface.py",
        "return value.T if tensor.transposed else value",
        "return value",
        ("tests/unit/test_huggingface.py::test_nothing_is_lost_on_the_way",),
    ),
)
