"""The command line: ``solrl train | report | ...``.

Exit codes: 0 done, 1 failed, 2 bad usage, 3 stopped by a signal with everything saved. Heavy imports stay inside the
commands, so that help and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from solrl.config import Config
from solrl.errors import SolrlError, UsageError
from solrl.settings import load_config, read_flags, shipped_configs, toml_value


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the process's exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    shows_traceback = os.environ.get("SOLRL_DEBUG", "") not in ("", "0")
    if "--debug" in words:
        words.remove("--debug")
        shows_traceback = True
    try:
        _run(words)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough (`| head`); Python would complain again when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SolrlError as error:
        if shows_traceback:
            traceback.print_exc()
        rank = os.environ.get("RANK", "0")
        for line in str(error).splitlines():
            print(f"solrl: error: {line}" if rank == "0" else f"solrl: error (rank {rank}): {line}", file=sys.stderr)
        return error.exit_code
    return 0


def _run(words: list[str]) -> None:
    if words in ([], ["-h"], ["--help"], ["help"]):
        print(_overview())
    elif words in (["version"], ["--version"]):
        from solrl import __version__

        print(f"solrl {__version__}")
    elif words[0] in COMMANDS:
        COMMANDS[words[0]](words[1:])
    else:
        raise UsageError(f"no command {words[0]!r}; there are {', '.join(COMMANDS)}, version (solrl --help)")


def _overview() -> str:
    indent = " " * 6
    configs = textwrap.fill(", ".join(shipped_configs()) + ".", 80, initial_indent=indent, subsequent_indent=indent)
    return f"""usage: solrl COMMAND ...

  train CONFIG [--section.key value ...] [--resume]
      Train a LoRA by reinforcement learning. CONFIG is a TOML file or one of
{configs}
      `solrl train --help` lists every setting.
  replay RUN --step S --candidate I [--prompt G]
      Draw a candidate of a finished step again, from the run's ledger.
  evaluate RUN [--rewards A,B] [--suite FILE]
      Compare base model, EMA and raw weights on held-out prompts.
  plan CONFIG --gpu h200 [--gpus N] [--section.key value ...]
      Estimate memory and seconds on GPUs that are not here.
  prompts fetch NAME [--out FILE] [--from LOCAL_COPY]
      Make a prompt file of a public suite, with its source beside it.
  report RUN
      Say whether the training is normal, and write RUN/report.html anew.
  trace RUN [-o FILE]
      Write who did what and when, as ui.perfetto.dev opens it.
  export RUN OUT [--step S | --best] [--raw] [--push OWNER/NAME]
      Write what a checkpoint trained as diffusers loads it; push it to the hub.
  doctor [--json]
      What this machine can run, and whether what learning hangs on works.
  reward-server CONFIG [--host H] [--port P] [--device D]
      Serve CONFIG's reward to runs whose reward is `remote`.
  version

Every command takes --help, and --debug to show where an error came from.
Exit codes: 0 done, 1 failed, 2 bad usage, 3 stopped by a signal, all saved."""


def _train(words: list[str]) -> None:
    is_resume = "--resume" in words
    words = [word for word in words if word != "--resume"]
    name = words[0] if words and not words[0].startswith("-") else None
    if "--help" in words or "-h" in words:
        return print_settings(Config() if name is None else load_config(name))
    if name is None:
        raise UsageError(f"solrl train CONFIG ...: a TOML file or one of {', '.join(shipped_configs())} comes first")
    config = load_config(name, read_flags(words[1:]))
    from solrl.train import train

    train(config, resume=is_resume)


class _Parser(argparse.ArgumentParser):
    """argparse whose mistakes are UsageErrors."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message} ({self.prog} --help)")


def _replay(words: list[str]) -> None:
    parser = _Parser("solrl replay", description="Draw a ledger entry again, as it was drawn, and score it.")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--step", type=int, required=True, help="a finished step, counted from 1")
    parser.add_argument("--candidate", type=int, required=True, help="its candidate, counted from 0")
    parser.add_argument("--prompt", type=int, help="count candidates within this prompt of the step (from 0)")
    parser.add_argument("--out", type=Path, help="folder for the images (RUN/replay)")
    parser.add_argument("--trust-code", action="store_true", help="run the code and ask the servers that the run names")
    chosen = parser.parse_args(words)
    from solrl.replay import replay

    replay(
        chosen.run, chosen.step, chosen.candidate,
        prompt_index=chosen.prompt, out=chosen.out, trust_code=chosen.trust_code,
    )  # fmt: skip


def _evaluate(words: list[str]) -> None:
    parser = _Parser(
        "solrl evaluate",
        description="Compare a run's base model, its averaged weights (EMA) and its raw weights on held-out prompts, "
        "with the same seeds, and save scores and image grids. Several processes, with the same result: accelerate "
        "launch ... --module solrl evaluate RUN ...",
        epilog="Settings of the run are changed as in training: --evaluate.images_per_prompt 8, "
        "--evaluate.num_steps 40, --evaluate.num_prompts 500, --evaluate.seed 7.",
    )
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--rewards", metavar="A,B", help="what is measured (what the run itself measures)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="REWARD.KEY=VALUE", help="an option of a reward; repeatable"
    )
    parser.add_argument("--suite", metavar="PROMPTS", help="prompts, all of them (what the run itself evaluates)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="the checkpoint of this step (the newest)")
    which.add_argument("--best", action="store_true", help="the checkpoint with the best held-out reward")
    parser.add_argument(
        "--pipeline-defaults", action="store_true", help="also at the pipeline's default guidance and steps"
    )
    parser.add_argument("--out", type=Path, help="folder for the results (RUN/evaluations/SUITE_step_N)")
    parser.add_argument("--trust-code", action="store_true", help="run the code and ask the servers that the run names")
    chosen, flags = parser.parse_known_args(words)
    options: dict[str, dict[str, Any]] = {}
    for option in chosen.option:
        key, equals, value = option.partition("=")
        reward, dot, name = key.rpartition(".")
        if not (equals and dot):
            raise UsageError(f"--option {option}: write REWARD.KEY=VALUE")
        options.setdefault(reward, {})[name] = toml_value(value)
    names = tuple(name.strip() for name in chosen.rewards.split(",") if name.strip()) if chosen.rewards else ()
    strangers = sorted(set(options) - set(names)) if names else []
    if strangers:
        raise UsageError(f"--option {strangers[0]}: it is not among --rewards {chosen.rewards}")
    overrides = read_flags(flags)
    from solrl.comparison import Comparison, compare

    wanted = Comparison(
        rewards=names,
        options=options,
        suite=chosen.suite,
        overrides=overrides,
        step="best" if chosen.best else chosen.step,
        at_defaults=chosen.pipeline_defaults,
        out=chosen.out,
    )
    compare(chosen.run, wanted, trust_code=chosen.trust_code)


def _plan(words: list[str]) -> None:
    from solrl.hardware import GPUS, find_gpu

    parser = _Parser(
        "solrl plan",
        description="Estimate what a config takes on GPUs that are not here: batch geometry, memory by part, seconds "
        "by phase, and the settings that would make it fit. Shapes only: no weight is loaded, nothing downloaded.",
        epilog="Further settings as in training: --batch.train 4.",
    )
    parser.add_argument("config", help="TOML file or shipped name")
    parser.add_argument("--gpu", required=True, help=", ".join(GPUS))
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help="how many (8)")
    parser.add_argument("--efficiency", type=float, help="share of the peak that is reached (0.22)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    chosen, flags = parser.parse_known_args(words)
    gpu, config = find_gpu(chosen.gpu), load_config(chosen.config, read_flags(flags))
    if chosen.gpus < 1 or not 0 < (chosen.efficiency or 1) <= 1:
        raise UsageError("--gpus is at least 1, and --efficiency above 0 and at most 1")
    import json

    from solrl.plan import EFFICIENCY, changes_that_fit, lines, make_plan
    from solrl.shapes import Shapes

    shapes = Shapes(config)
    plan = make_plan(config, gpu, chosen.gpus, shapes=shapes, efficiency=chosen.efficiency or EFFICIENCY)
    changes = changes_that_fit(plan, shapes)
    if chosen.json:
        print(json.dumps(plan.as_dict() | {"changes_that_fit": changes}, indent=2))
    else:
        print("\n".join(lines(plan, changes)))


def _prompts(words: list[str]) -> None:
    from solrl.suites import HOST, SUITES, fetch_prompts

    parser = _Parser(
        "solrl prompts",
        description="Make a prompt file of a public suite. FILE.source.json says where it came from.",
        epilog="suites:\n" + "\n".join(f"  {name:16} {suite.about}" for name, suite in SUITES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=["fetch"])
    parser.add_argument("name", metavar="NAME", help="one of the suites below")
    parser.add_argument("--out", type=Path, help="file (NAME.txt, or NAME.jsonl for GenEval)")
    parser.add_argument(
        "--from", dest="local_copy", type=Path, metavar="FILE", help="a local copy; nothing is downloaded"
    )
    parser.add_argument("--num-prompts", type=int, metavar="N", help="only N of them, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0, help="of that draw (0)")
    parser.add_argument("--host", default=HOST, help=f"a mirror of {HOST}")
    chosen = parser.parse_args(words)
    fetch_prompts(
        chosen.name, out=chosen.out, local_copy=chosen.local_copy,
        num_prompts=chosen.num_prompts, seed=chosen.seed, host=chosen.host,
    )  # fmt: skip


def _report(words: list[str]) -> None:
    parser = _Parser(
        "solrl report",
        description="Say whether the run's training is normal, and why; write RUN/report.html anew.",
    )
    parser.add_argument("run", type=Path, help="run folder")
    chosen = parser.parse_args(words)
    from solrl.display import labelled
    from solrl.report import recorded, write_report
    from solrl.verdict import judge

    path = write_report(chosen.run)
    print("\n".join([*labelled("verdict", judge(*recorded(chosen.run)).line), f"report: {path}"]))


def _trace(words: list[str]) -> None:
    parser = _Parser(
        "solrl trace",
        description="Write the timeline of a run whose processes changed roles as a Chrome trace: open it in "
        "ui.perfetto.dev or chrome://tracing.",
    )
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="the trace (RUN/trace.json)")
    chosen = parser.parse_args(words)
    from solrl.trace import write_trace

    print(write_trace(chosen.run, chosen.out or chosen.run / "trace.json"))


def _export(words: list[str]) -> None:
    parser = _Parser("solrl export", description="Write what a checkpoint trained and a model card into OUT.")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("out", type=Path, help="folder for the LoRA (or the transformer, if all of it was trained)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="the checkpoint of this step (the newest)")
    which.add_argument("--best", action="store_true", help="the checkpoint with the best held-out reward")
    parser.add_argument("--raw", action="store_true", help="the policy itself instead of its average (EMA)")
    parser.add_argument("--push", metavar="OWNER/NAME", help="also push it to this model repository of the hub")
    parser.add_argument("--public", action="store_true", help="a repository that --push makes is public (private)")
    chosen = parser.parse_args(words)
    if chosen.public and not chosen.push:
        raise UsageError("solrl export: --public is for --push OWNER/NAME")
    from solrl.export import export_run
    from solrl.hub import push

    print(export_run(chosen.run, chosen.out, step="best" if chosen.best else chosen.step, raw=chosen.raw))
    if chosen.push:
        print(push(chosen.out, chosen.push, public=chosen.public))


def _doctor(words: list[str]) -> None:
    parser = _Parser("solrl doctor", description="What this machine can run; all that is said to work was just tried.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    chosen = parser.parse_args(words)
    import json

    from solrl.doctor import diagnose, lines

    diagnosis = diagnose()
    print(json.dumps(diagnosis.as_dict(), indent=2) if chosen.json else "\n".join(lines(diagnosis)))
    if not diagnosis.is_healthy:
        broken = ", ".join(test.name for test in diagnosis.tests if not test.works)
        raise SolrlError(f"what learning hangs on is broken here: {broken}")


def _reward_server(words: list[str]) -> None:
    parser = _Parser(
        "solrl reward-server",
        description="Serve the reward of CONFIG to `remote` rewards, until Ctrl-C. An address that other machines "
        "reach needs a token in the environment variable SOLRL_REWARD_TOKEN, here and where the run is.",
    )
    parser.add_argument("config", help="TOML file or shipped name; only its [reward] is used")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8300, help="0 takes a free one (8300)")
    parser.add_argument("--device", help="where images are scored (a GPU if there is one)")
    chosen, flags = parser.parse_known_args(words)
    config = load_config(chosen.config, read_flags(flags))
    import torch
    from solrl_rewards.remote import TOKEN_VARIABLE
    from solrl_rewards.server import RewardServer

    from solrl.models.loading import quiet_loading
    from solrl.scorer import open_reward

    quiet_loading()
    reward = open_reward("reward.name", config.reward.name, config.reward.options)
    device = chosen.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        server = RewardServer(reward, chosen.host, chosen.port, token=os.environ.get(TOKEN_VARIABLE), device=device)
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        raise UsageError(f"cannot serve on {chosen.host}:{chosen.port}: {str(error).splitlines()[0]}") from error
    print(f"{reward.name} on {device} at http://{chosen.host}:{server.server_port}", flush=True)
    with server, suppress(KeyboardInterrupt):
        server.serve_forever()


def print_settings(config: Config) -> None:
    """Prints every setting with its meaning, its type and the value ``config`` has, in the flags' form."""
    import tyro

    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def _options(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        if info.type_origin is not dict:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar=".NAME VALUE",
            instance_from_str=lambda words: {},
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=lambda value: [f"{key}={item}" for key, item in value.items()] or ["none"],
        )

    with suppress(SystemExit):
        tyro.cli(
            Config,
            args=["--help"],
            default=config,
            prog="solrl train CONFIG [--resume]",
            description="Flags override the file. Defaults shown are CONFIG's where one is given.",
            use_underscores=True,
            config=(tyro.conf.FlagConversionOff,),
            registry=registry,
        )


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": _train,
    "replay": _replay,
    "evaluate": _evaluate,
    "plan": _plan,
    "prompts": _prompts,
    "report": _report,
    "trace": _trace,
    "export": _export,
    "reward-server": _reward_server,
    "doctor": _doctor,
}
