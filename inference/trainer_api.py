"""What the trainer asks at the end of a run: a sample of text, and commands that a user can copy."""

import glob
import json
import shlex
from typing import Any

from titan.config import Job
from titan.contracts.plugin.options import as_table, options_of
from titan.inference.generation import sample as sample
from titan.packages import program
from titan.paths import expanded


def commands(job: Job) -> dict[str, str]:
    """What can be done with a run's model -> the command."""
    return {"generate": generation_command(job), "evaluate": evaluation_command(job)}


def generation_command(job: Job) -> str:
    """The `titan generate` command for a run's model; paths are absolute, so that it works from any folder."""
    prompt = (job.run.sample_prompt.splitlines() or ["The"])[0]
    words = [f"--prompt={prompt}"] if prompt[:1] == "-" else ["--prompt", prompt]
    return shlex.join([*_titan("generate", job), *words])


def evaluation_command(job: Job) -> str:
    """The `titan eval` command for a run's model, on its validation split if it has one, else on its training data."""
    dataset = job.validation_data or job.sources[0].plugin
    words = [*_titan("eval", job), "--data", dataset.name]
    defaults = {option.key: option.default for option in options_of(type(dataset.config))}
    for key, value in as_table(dataset.config).items():
        if value != (list(default) if isinstance(default := defaults[key], tuple) else default):
            value = _placed(value) if key == "path" else value
            words += [f"--data.{key}", value if isinstance(value, str) else json.dumps(value)]
    return shlex.join(words)


def _titan(command: str, job: Job) -> list[str]:
    """The first words of a command on a run: its model, and the plugins of one's own that the model may need."""
    words = [*program("titan", "titan.cli"), command, "--checkpoint", str(job.folder.resolve())]
    folders = [str(expanded(folder, "[plugins] path").resolve()) for folder in job.table["plugins"]["path"]]
    return [*words, *(("--plugins.path", json.dumps(folders)) if folders else ())]


def _placed(value: Any) -> Any:
    """A path, or each of a list, from the root where it leads somewhere from here."""
    if not isinstance(value, str):
        return [_placed(each) for each in value] if isinstance(value, list) else value
    path = expanded(value, "data.path")
    return str(path.absolute()) if path.exists() or glob.glob(str(path), recursive=True) else value
