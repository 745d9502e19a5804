"""Faults of tokenizers: which one weights belong to, how published files are read, what is lost of text."""

from titan.testing.faults import Fault

KEPT = "tests/dist/test_weights_tokenizer.py"
PUBLISHED = "tests/dist/test_published_folders.py"
HF = "tests/unit/test_tokenizers_hf.py"
PREPARE = "tests/unit/test_data_prepare.py"

FAULTS = (
    Fault(
        "eval with the tokenizer of the path, not that of the checkpoint",
        "titan/data/tokens/identity.py",
        'copies = identity["copies"] or {}',
        'copies = identity["copies"] and {}',
        (f"{KEPT}::test_a_checkpoint_is_used_with_its_own_tokenizer",),
    ),
    Fault(
        "another tokenizer for a checkpoint accepted",
        "titan/inference/load_model.py",
        "check_tokenizer(path, job.tokenizer, change=job.checkpoint.change_tokenizer)",
        "pass",
        (f"{KEPT}::test_a_checkpoint_is_used_with_its_own_tokenizer",),
    ),
    Fault(
        "a new run from weights with another tokenizer",
        "titan/training/build.py",
        "check_tokenizer(path, job.tokenizer, change=section.change_tokenizer)",
        "pass",
        (f"{KEPT}::test_a_new_run_needs_the_tokenizer_of_its_weights",),
    ),
    Fault(
        "a resume with another tokenizer under the name of changed files",
        "titan/checkpoint/resume.py",
        'if other_tokenizer and not section["change_tokenizer"]:',
        'if section["change_tokenizer"]:',
        ("tests/unit/test_resume.py::test_another_tokenizer_is_refused_or_said",),
    ),
    Fault(
        "copies of a tokenizer that no manifest lists",
        "titan/checkpoint/checkpointer.py",
        "*folders.write_copies(path, self._copies))",
        "*folders.write_copies(path, self._copies)[:0])",
        ("tests/unit/test_checkpoint_command.py::test_copies_of_the_tokenizer_are_part_of_a_checkpoint",),
    ),
    Fault(
        "a copy outside the checkpoint's folder",
        "titan/checkpoint/weights.py",
        '(not name or is_checkpoint_file(f"{TOKENIZER}/{name}"))',
        "True",
        ("tests/unit/test_checkpoint_command.py::test_copies_of_the_tokenizer_are_part_of_a_checkpoint",),
    ),
    Fault(
        "merges dropped at random",
        "plugins/tokenizers/hf.py",
        "setattr(model, key, None)",
        "pass",
        (f"{HF}::test_random_merges_are_switched_off",),
    ),
    Fault(
        "text that becomes a special token",
        "plugins/tokenizers/hf.py",
        "_cut_names(library, self._specials(library, end))",
        "pass",
        (f"{HF}::test_text_never_becomes_a_special_token_though_the_vocabulary_holds_it",),
    ),
    Fault(
        "special_tokens_map.json not read",
        "plugins/tokenizers/hf.py",
        "_name({**self._about, **self._map}.get(key))",
        "_name({**self._map, **self._about}.get(key))",
        (f"{HF}::test_tokens_beside_the_file_are_added",),
    ),
    Fault(
        "documents scored from the end id though there is BOS",
        "plugins/tokenizers/hf.py",
        "Delimiters(end if number is None else number,",
        "Delimiters(end if number is not None else end,",
        (f"{PUBLISHED}::test_documents_are_scored_as_by_lm_eval[neox]",),
    ),
    Fault(
        "prompts without the BOS token that the tokenizer adds",
        "titan/inference/generation.py",
        "(*around.before, *job.tokenizer.encode(prompt), *around.after)",
        "(*job.tokenizer.encode(prompt), *around.after)",
        (f"{PUBLISHED}::test_prompts_are_continued_as_by_transformers[llama]",),
    ),
    Fault(
        "texts that end at one of several end ids alone",
        "plugins/tokenizers/hf.py",
        "stops = self._published.stops(end) or [end]",
        "stops = [end]",
        (f"{PUBLISHED}::test_prompts_are_continued_as_by_transformers[llama]",),
    ),
    Fault(
        "files of a folder lost in a conversion",
        "plugins/tokenizers/hf.py",
        "return {name: self._content, **read, **passed_on}",
        "return {name: self._content}",
        (f"{PUBLISHED}::test_a_conversion_there_and_back_loses_no_file[llama]",),
    ),
    Fault(
        "lost characters not counted",
        "titan/data/tokens/tokenize.py",
        'Counter(normalize("NFC", text)) - Counter(normalize("NFC", decoded))',
        'Counter(normalize("NFC", text)) - Counter(normalize("NFC", text))',
        (f"{PREPARE}::test_what_a_tokenizer_loses_is_counted_and_limited",),
    ),
    Fault(
        "tokens of another tokenizer trained",
        "titan/data/tokens/prepare.py",
        'if made_by not in ("", tokenizer.fingerprint):',
        'if made_by == "":',
        (f"{PREPARE}::test_shards_are_taken_as_they_are_and_checked",),
    ),
    Fault(
        "a rank file read as one of another family",
        "titan/data/tokens/bytepairs.py",
        'PUBLISHED.get(len(ranks)) if ranks.get(b"!") == 0 else None',
        'next(iter(PUBLISHED.values())) if ranks.get(b"!") == 0 else None',
        ("tests/unit/test_tokenizers.py::test_the_ranks_tell_the_family",),
    ),
)
