"""``tokenspeed.LLM`` and ``generate`` over the toy model: one process, no files."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokenspeed import LLM, SamplingParams
from tokenspeed.cli.main import main
from tokenspeed.errors import ConfigError, EngineError, RequestError, TokenSpeedError
from tokenspeed.testing.plugins import PluginFolder


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("toy", plugins="none", num_threads=1) as made:
        yield made


def sampled(tokens: int = 12, **changes: object) -> SamplingParams:
    base = {"max_new_tokens": tokens, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    return SamplingParams(**(base | changes))  # type: ignore[arg-type]


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(6)]
    together = llm.generate(prompts, [sampled(4 + i) for i in range(6)])
    assert [result.prompt for result in together] == prompts
    assert [len(result.token_ids) for result in together] == [4, 5, 6, 7, 8, 9]
    assert {result.finish for result in together} == {"length"}
    assert [llm.generate(prompt, sampled(4 + i))[0].text for i, prompt in enumerate(prompts)] == [
        r.text for r in together
    ]


def test_a_prompt_may_be_token_ids(llm: LLM) -> None:
    ids = llm.tokenizer.encode("abc")
    (by_ids,) = llm.generate(ids, sampled())
    (by_text,) = llm.generate(["abc"], sampled())
    assert by_ids.token_ids == by_text.token_ids
    assert (by_ids.prompt, by_ids.prompt_token_ids) == (None, ids)
    assert len(llm.generate([ids, ids], sampled())) == 2


def test_a_stream_adds_up_to_the_result(llm: LLM) -> None:
    pieces = list(llm.stream(["one", "two"], sampled()))
    for index in (0, 1):
        mine = [piece for piece in pieces if piece.index == index]
        assert mine[-1].result is not None
        assert "".join(piece.text for piece in mine) == mine[-1].result.text
        assert [piece.result for piece in mine[:-1]] == [None] * (len(mine) - 1)


def test_a_stop_text_ends_a_completion_and_is_left_out(llm: LLM) -> None:
    (whole,) = llm.generate("abc", sampled(24))
    stop = whole.text[8:10]
    (cut,) = llm.generate("abc", sampled(24), stop=[stop])
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish, cut.stop_reason) == ("stop", stop)


def test_leaving_a_stream_early_ends_its_requests(llm: LLM) -> None:
    stream = llm.stream(["abc"], sampled(200))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.busy
    assert llm.generate("abc", sampled(2))[0].finish == "length"


def test_streams_may_be_read_in_turns_and_nested(llm: LLM) -> None:
    """A step tells of all requests: none of it is lost for a stream that is not being read at that moment."""
    alone = [llm.generate(prompt, sampled(20))[0].text for prompt in ("one", "two", "three")]
    first, second = llm.stream("one", sampled(20)), llm.stream("two", sampled(20))
    texts = ["", "", ""]
    texts[0] += next(first).text
    texts[1] += next(second).text
    texts[2] += llm.generate("three", sampled(20))[0].text
    for piece in second:
        texts[1] += piece.text
    for piece in first:
        texts[0] += piece.text
    assert texts == alone
    assert not llm.engine.busy


def test_leaving_one_stream_leaves_the_others_alone(llm: LLM) -> None:
    (alone,) = llm.generate("one", sampled(20))
    kept, left = llm.stream("one", sampled(20)), llm.stream("two", sampled(200))
    text = next(kept).text
    next(left)
    left.close()  # type: ignore[attr-defined]
    assert text + "".join(piece.text for piece in kept) == alone.text
    assert not llm.engine.busy


def test_a_stream_of_a_closed_llm_says_so() -> None:
    with LLM("toy", plugins="none", num_threads=1) as made:
        stream = made.stream("abc", sampled(200))
        next(stream)
    with pytest.raises(EngineError, match="closed"):
        list(stream)


EVENTS = """
@hookimpl
def tokenspeed_options():
    return [OptionSpec(name="file", type=str, default="", help="where to write")]

@hookimpl
def tokenspeed_configure(context):
    global file
    file = context.options["file"]
    note("configure")

@hookimpl
def tokenspeed_process_init(context):
    note(f"process_init {context.role}")

@hookimpl
def tokenspeed_engine_ready(context):
    note(f"engine_ready {context.model_name} {context.kv_pages > 0} {context.seconds > 0}")

@hookimpl
def tokenspeed_shutdown(context):
    note(f"shutdown {context.reason}")

def note(line):
    with open(file, "a") as out:
        out.write(line + "\\n")
"""


def test_plugins_see_the_whole_life_of_an_llm(tmp_path: Path) -> None:
    """Readiness too, and the end where the engine cannot be built."""
    seen = tmp_path / "seen"
    with PluginFolder(tmp_path / "site") as folder:
        folder.add("witness", EVENTS)
        flags = {"plugins": "witness", "plugin_options": {"witness.file": str(seen)}, "num_threads": 1}
        LLM("toy", **flags).close()
        assert seen.read_text().splitlines() == [
            "configure",
            "process_init engine",
            "engine_ready toy True True",
            "shutdown closed",
        ]
        seen.unlink()
        with pytest.raises(TokenSpeedError):
            LLM("toy", **flags, kv_cache_memory_bytes=1)
        lines = seen.read_text().splitlines()
    assert lines[:2] == ["configure", "process_init engine"]
    assert lines[2].startswith("shutdown ConfigError: ")


def test_chat_renders_the_models_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    result = llm.chat(messages, sampled(3))
    assert result.prompt_token_ids == llm.render(messages)
    assert "hi" in llm.tokenizer.decode(result.prompt_token_ids)


def test_logprobs_are_one_per_token(llm: LLM) -> None:
    (result,) = llm.generate("abc", sampled(5, logprobs=2, prompt_logprobs=0))
    assert result.logprobs is not None
    assert result.prompt_logprobs is not None
    assert [len(entry.top_ids) for entry in result.logprobs] == [2] * 5
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
    assert result.prompt_logprobs[0] is None


def test_statistics_count_tokens_and_cache_hits(llm: LLM) -> None:
    llm.generate("x" * 200, sampled(2))
    (again,) = llm.generate("x" * 200, sampled(2))
    assert again.stats is not None
    assert again.stats.prompt_tokens == len(again.prompt_token_ids)
    assert again.stats.cached_tokens > 100


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"stop_token_ids": (10**6,)}, "stop_token_ids"),
        ({"logit_bias": ((3, 1e9),)}, "logit_bias"),
        ({"max_new_tokens": 10**6}, "max_new_tokens"),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(llm: LLM, params: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate("abc", sampled(**params))  # type: ignore[arg-type]
    assert not llm.engine.busy


def test_prompts_and_parameters_must_match_in_number(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 prompts but 3"):
        llm.generate(["a", "b"], [sampled()] * 3)
    with pytest.raises(RequestError, match="no token"):
        llm.generate([[]], sampled())
    assert llm.generate([]) == []


def test_unknown_and_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"did you mean.*max_model_len"):
        LLM("toy", max_model_length=8)
    with pytest.raises(ConfigError, match="one rank"):
        LLM("toy", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM("toy", max_num_seqs="many")


def test_the_environment_names_plugins_where_the_caller_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSPEED_PLUGINS", "no-such-plugin")
    with pytest.raises(ConfigError, match="no-such-plugin"):
        LLM("toy")
    LLM("toy", plugins="none", num_threads=1).close()


def test_a_closed_llm_says_so() -> None:
    made = LLM("toy", plugins="none", num_threads=1)
    made.close()
    made.close()
    with pytest.raises(EngineError, match="closed"):
        made.generate("abc")


def test_the_command_prints_one_completion_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["generate", "toy", "--plugins", "none", "--num-threads", "1", "--max-tokens", "6", "--ignore-eos"]
    assert main([*flags, "--prompt", "abc"]) == 0
    assert capsys.readouterr().out.endswith("\n")


def test_the_command_prints_json_for_each_prompt(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("two\nthree\n")
    flags = [
        "generate",
        "toy",
        "--plugins",
        "none",
        "--num-threads",
        "1",
        "--max-tokens",
        "6",
        "--ignore-eos",
        "--json",
    ]
    assert main([*flags, "--prompt", "one", "--prompt-file", str(file)]) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [result["prompt"] for result in results] == ["one", "two", "three"]
    assert all(len(result["token_ids"]) == 6 and result["stats"]["output_tokens"] == 6 for result in results)


@pytest.mark.parametrize("flags", [[], ["--system", "x", "--prompt", "y"], ["--prompt-file", "missing.txt"]])
def test_the_command_says_what_is_missing(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "toy", *flags]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, tokenspeed; assert 'torch' not in sys.modules; tokenspeed.SamplingParams; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    "wrong",
    [
        ("--prompt", ""),
        ("--max-tokens", "0"),
        ("--temperature", "-1"),
        ("--top-p", "0"),
        ("--min-p", "2"),
        ("--stop", ""),
        ("--skip-tokenizer-init",),
    ],
)
def test_generate_names_the_flag_that_is_wrong(wrong: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is loaded, with the exit code of a wrong setting."""
    try:
        code = main(["generate", "toy", "--prompt", "abc", *wrong])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2
    assert wrong[0] in capsys.readouterr().err


def test_standard_input_that_is_no_text_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    assert main(["generate", "toy", "--prompt", "-"]) == 2
    assert "not UTF-8" in capsys.readouterr().err


def test_ctrl_c_ends_the_requests_and_leaves_the_model_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """It comes in the midst of a step, between a plan and its results."""
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell starts what runs in the background with SIGINT ignored
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    executor = llm.engine._loop._executor
    execute, steps = executor.execute, iter(range(100))

    def interrupted(*given: Any) -> Any:
        if next(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return execute(*given)

    (alone,) = llm.generate("one", sampled(20))
    other = llm.stream("one", sampled(20))
    text = next(other).text
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine._loop, "_executor", SimpleNamespace(execute=interrupted))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["abc", "def"], sampled(200))
    assert text + "".join(piece.text for piece in other) == alone.text
    assert not llm.engine.busy
    assert llm.generate("abc", sampled(2))[0].finish == "length"


def test_threads_may_generate_at_once(llm: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(8)]
    alone = [result.text for result in llm.generate(prompts, sampled(30))]
    with ThreadPoolExecutor(4) as threads:
        texts = list(threads.map(lambda prompt: llm.generate(prompt, sampled(30))[0].text, prompts))
    assert texts == alone
    assert not llm.engine.busy


def test_a_single_stop_text_is_one(llm: LLM) -> None:
    (whole,) = llm.generate("abc", sampled(24))
    stop = whole.text[8:11]
    assert llm.generate("abc", sampled(24), stop=stop)[0].stop_reason == stop


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompts": "a", "stop": ""}, "stop: an empty string"),
        ({"prompts": "a", "stop": [1]}, "stop: give texts, not a int"),
        ({"prompts": None}, "prompts: .* not None"),
        ({"prompts": [None]}, "prompt: .* not None"),
        ({"prompts": ["ab"], "params": {"max_new_tokens": 3}}, "params: give SamplingParams, not a dict"),
        ({"prompts": [1, 1 << 40]}, "prompt: 1099511627776 is no token id"),
        ({"prompts": [-1]}, "prompt: -1 is no token id"),
        ({"prompts": [[1.5]]}, "prompt: 1.5 is no token id"),
        ({"prompts": "\ud800"}, "prompt: the text cannot be encoded"),
        ({"prompts": "a", "params": SamplingParams(max_new_tokens=0)}, "max_new_tokens: 0 is not"),
        ({"prompts": "a", "params": SamplingParams(temperature=-1.0)}, "^temperature: "),
        (
            {"prompts": "a", "params": SamplingParams(repetition_penalty=1e-40)},
            r"^repetition_penalty: must lie in 0.01\.\.100",
        ),
        ({"prompts": "a", "params": SamplingParams(repetition_penalty=float("nan"))}, "^repetition_penalty: "),
    ],
)
def test_wrong_input_is_named_before_anything_runs(llm: LLM, given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(**given)
    assert not llm.engine.busy


def test_sampling_params_need_no_length(llm: LLM) -> None:
    (result,) = llm.generate("abc", SamplingParams(temperature=0.0, ignore_eos=True))
    assert len(result.token_ids) == 128


def test_a_model_without_its_tokenizer_takes_ids() -> None:
    with LLM("toy", plugins="none", num_threads=1, skip_tokenizer_init=True) as made:
        assert len(made.generate([1, 2, 3], sampled(4))[0].token_ids) == 4
        with pytest.raises(RequestError, match="skip"):
            made.generate("abc")


def test_a_failed_step_is_told_as_it_is_and_closes_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no such kernel image")

    with LLM("toy", plugins="none", num_threads=1) as made:
        monkeypatch.setattr(made.engine._loop, "_executor", SimpleNamespace(execute=broken))
        with pytest.raises(RuntimeError, match="no such kernel image"):
            made.generate("abc", sampled(4))
        with pytest.raises(EngineError, match="no such kernel image"):
            made.generate("abc", sampled(4))
