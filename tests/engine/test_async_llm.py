"""AsyncLLM: many clients on one loop, the engine in a thread or a child process, messages only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rooftile.engine.async_llm import AsyncLLM, EngineDeadError
from rooftile.engine.llm import LLM
from rooftile.engine.messages import EngineDied
from rooftile.engine.params import SamplingParams
from rooftile.engine.process import EngineProcess
from tests.support.gate import shut_gate, wait_until

LONG = SamplingParams(max_tokens=120, ignore_eos=True, seed=1)
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
OPTIONS = {"dtype": "float32", "random_weights": True, "num_pages": 64, "page_size": 4}


Body = Callable[[AsyncLLM], Awaitable[None]]


@pytest.fixture(scope="module")
def in_process(model_path: str) -> Iterator[AsyncLLM]:
    """One child for all tests: starting it takes seconds."""
    engine = AsyncLLM(model_path, engine="process", **OPTIONS)
    yield engine
    engine.shutdown()


@pytest.fixture(params=["thread", "process"])
def run(request: pytest.FixtureRequest, model_path: str) -> Callable[[Body], None]:
    """Runs a body with an engine, and checks that it leaves nothing behind."""

    def run_with(body: Body) -> None:
        process = request.param == "process"
        before = set(threading.enumerate())
        engine = (
            request.getfixturevalue("in_process") if process else AsyncLLM(model_path, **OPTIONS)
        )

        async def main() -> None:
            await body(engine)
            for _ in range(200):  # aborts are messages: give the engine its turn
                if (stats := await engine.stats()).kv.in_use == 0:
                    break
            assert stats.kv.in_use == 0
            assert (stats.num_running, stats.num_waiting) == (0, 0)
            if not process:
                engine.shutdown()

        asyncio.run(asyncio.wait_for(main(), 60))
        left = set(threading.enumerate()) - before
        assert not [t for t in left if t.name == "rooftile-engine"]

    return run_with


async def last_text(stream: AsyncIterator) -> str:  # type: ignore[type-arg]
    text = ""
    async for output in stream:
        assert output.outputs[0].text.startswith(text)
        text = output.outputs[0].text
    assert output.finished
    return text


def test_many_clients_get_what_generate_gives(run: Callable[[Body], None], llm: LLM) -> None:
    prompts = [f"prompt {number}" for number in range(12)]
    expected = [output.outputs[0].text for output in llm.generate(prompts, SHORT)]

    async def body(engine: AsyncLLM) -> None:
        texts = await asyncio.gather(*(last_text(engine.generate(p, SHORT)) for p in prompts))
        assert texts == expected

    run(body)


def test_who_is_busy_while_it_ends_is_shown_the_end(run: Callable[[Body], None]) -> None:
    async def body(engine: AsyncLLM) -> None:
        shown = []
        async for output in engine.generate("busy", SHORT):
            shown.append(output.finished)
            while not output.finished:
                await asyncio.sleep(0.001)
        assert len(shown) <= 2
        assert shown[-1]

    run(body)


def test_leaving_and_cancelling_abort_the_request(run: Callable[[Body], None]) -> None:
    async def body(engine: AsyncLLM) -> None:
        async for output in engine.generate("leave", LONG):
            if len(output.outputs[0].token_ids) > 3:
                break
        with shut_gate() as gate:
            held = replace(LONG, logits_processor=gate)
            task = asyncio.create_task(last_text(engine.generate("cancel", held)))
            await asyncio.sleep(0.002)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert len(await last_text(engine.generate("after", SHORT))) > 0

    run(body)


def test_abort_ends_the_stream_with_its_reason(run: Callable[[Body], None]) -> None:
    async def body(engine: AsyncLLM) -> None:
        output = engine.add_request("abort me", LONG, request_id="mine")
        engine.abort("mine")
        engine.abort("mine")
        engine.abort("never existed")
        seen = [news async for news in engine.follow(output)]
        assert seen[-1].outputs[0].finish_reason == "abort"

    run(body)


def test_a_result_that_came_before_anyone_looked_is_still_seen(run: Callable[[Body], None]) -> None:
    async def body(engine: AsyncLLM) -> None:
        output = engine.add_request("quick", SHORT)
        while not output.finished:
            await asyncio.sleep(0.01)
        assert [news.finished async for news in engine.follow(output)] == [True]

    run(body)


def test_stop_strings_end_the_engines_work_too(run: Callable[[Body], None]) -> None:
    async def body(engine: AsyncLLM) -> None:
        assert engine.tokenizer is not None
        x = engine.tokenizer.encode("x")[-1]
        params = SamplingParams(logit_bias={x: 100.0}, temperature=0, stop="xx", max_tokens=None)
        async for output in engine.generate("a", params):
            last = output
        assert (last.outputs[0].finish_reason, last.outputs[0].text) == ("stop", "")

    run(body)


def test_refusals_are_immediate(run: Callable[[Body], None]) -> None:
    async def body(engine: AsyncLLM) -> None:
        with pytest.raises(ValueError, match="the prompt is empty"):
            engine.add_request([])
        engine.add_request("twice", SHORT, request_id="id")
        with pytest.raises(ValueError, match="request id 'id' is in use"):
            engine.add_request("twice", SHORT, request_id="id")
        engine.abort("id")

    run(body)


def test_late_news_of_an_aborted_request_never_reach_its_successor(
    run: Callable[[Body], None], llm: LLM
) -> None:
    expected = llm.generate("second", SHORT)[0].outputs[0].token_ids

    async def body(engine: AsyncLLM) -> None:
        for _ in range(20):
            engine.add_request("first", LONG, request_id="id")
            await asyncio.sleep(0.005)
            engine.abort("id")
            second = engine.add_request("second", SHORT, request_id="id")
            *_, last = [output async for output in engine.follow(second)]
            assert last is second
            assert (last.request_id, last.outputs[0].token_ids) == ("id", expected)

    run(body)


def test_following_a_finished_request_leaves_a_new_one_of_its_id_alone(
    run: Callable[[Body], None],
) -> None:
    async def body(engine: AsyncLLM) -> None:
        first = engine.add_request("first", SHORT, request_id="id")
        while not first.finished:
            await asyncio.sleep(0.01)
        second = engine.add_request("second", SHORT, request_id="id")
        assert [news async for news in engine.follow(first)] == [first]
        await last_text(engine.follow(second))
        assert second.outputs[0].finish_reason == "length"

    run(body)


def test_own_ids_do_not_collide_with_given_ones(run: Callable[[Body], None]) -> None:
    async def body(engine: AsyncLLM) -> None:
        start = int(engine.add_request("counted", SHORT).request_id)
        for number in range(start, start + 10):
            with contextlib.suppress(ValueError):  # in use
                engine.add_request("given", SHORT, request_id=str(number))
        ids = [engine.add_request("counted", SHORT).request_id for _ in range(5)]
        assert len(set(ids)) == 5
        engine.abort_all()

    run(body)


def test_wrong_salts_ids_and_parameters_are_refused_and_hurt_nobody(
    run: Callable[[Body], None],
) -> None:
    async def body(engine: AsyncLLM) -> None:
        for options, message in [
            ({"cache_salt": ["a"]}, r"cache_salt is \['a'\]; give something hashable"),
            ({"request_id": 5}, "request_id is 5; it must be a string"),
            ({"params": {}}, "takes SamplingParams or BeamSearchParams, not {}"),
        ]:
            with pytest.raises(ValueError, match=message):
                engine.add_request("wrong", **options)  # type: ignore[arg-type]
        assert await last_text(engine.generate("right", SHORT))

    run(body)


class Unreadable:
    """A logits processor that pickles, and does not come back."""

    def __call__(self, output_ids: object, logits: object) -> object:
        return logits

    def __reduce__(self) -> object:
        return (_raise, ("no such function here",))


def _raise(message: str) -> None:
    raise AttributeError(message)


def test_a_processor_that_cannot_travel_is_its_requests_error(in_process: AsyncLLM) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match=r"cannot be sent .*; a logits_processor must be"):
            in_process.add_request("a", SamplingParams(logits_processor=lambda ids, logits: logits))
        params = SamplingParams(logits_processor=Unreadable(), n=2)  # type: ignore[arg-type]
        *_, last = [output async for output in in_process.generate("b", params)]
        for answer in last.outputs:
            assert "cannot read the request: AttributeError: no such" in (answer.error or "")
        assert await last_text(in_process.generate("after", SHORT))

    asyncio.run(asyncio.wait_for(main(), 60))


def test_whatever_ends_the_loop_is_told(model_path: str) -> None:
    def leave(output_ids: object, logits: object) -> object:
        raise SystemExit(3)

    async def main() -> None:
        engine = AsyncLLM(model_path, **OPTIONS)
        with pytest.raises(EngineDeadError, match="SystemExit: 3"):
            await last_text(engine.generate("a", SamplingParams(logits_processor=leave)))  # type: ignore[arg-type]
        engine.shutdown()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_dead_engine_says_so_and_nobody_hangs(model_path: str) -> None:
    async def main() -> None:
        engine = AsyncLLM(model_path, **OPTIONS)

        def broken() -> None:
            raise MemoryError("the loop itself broke")

        engine._engine._core.step = broken  # type: ignore[assignment]
        task = asyncio.create_task(last_text(engine.generate("victim", LONG)))
        with pytest.raises(EngineDeadError, match="the loop itself broke"):
            await task
        assert not engine.is_alive
        with pytest.raises(EngineDeadError):
            engine.add_request("late", SHORT)
        with pytest.raises(EngineDeadError):
            await engine.stats()
        engine.shutdown()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_shutdown_ends_open_requests(model_path: str, kind: str) -> None:
    async def main() -> None:
        engine = AsyncLLM(model_path, engine=kind, **OPTIONS)
        task = asyncio.create_task(last_text(engine.generate("open", LONG)))
        await asyncio.sleep(0.002)
        engine.shutdown()
        engine.shutdown()
        await task
        with pytest.raises(EngineDeadError, match="shut down"):
            engine.add_request("late", SHORT)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_times_of_a_request(run: Callable[[Body], None]) -> None:
    async def body(engine: AsyncLLM) -> None:
        async for output in engine.generate("when", SHORT):
            last = output
        metrics, times = last.metrics, last.outputs[0].token_times
        assert len(times) == len(last.outputs[0].token_ids) == 8
        assert metrics.scheduled is not None
        assert metrics.finished is not None
        assert metrics.arrival <= metrics.scheduled <= times[0] == metrics.first_token
        assert times == sorted(times)
        assert times[-1] <= metrics.finished

    run(body)


def test_a_request_arrives_before_the_engine_begins_it(model_path: str) -> None:
    async def main() -> None:
        engine = AsyncLLM(model_path, **OPTIONS)
        send = engine._engine.send

        def send_to_a_fast_engine(message: Any) -> None:
            send(message)
            time.sleep(0.1)  # it begins, and may well end

        engine._engine.send = send_to_a_fast_engine  # type: ignore[method-assign]
        output = engine.add_request("when", SHORT)
        await last_text(engine.follow(output))
        assert output.metrics.scheduled is not None
        assert output.metrics.arrival <= output.metrics.scheduled
        engine.shutdown()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_request_that_cannot_be_sent_leaves_nothing(in_process: AsyncLLM) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="cannot be sent"):
            in_process.add_request("a", SamplingParams(logits_processor=lambda ids, logits: logits))
        assert not in_process._open
        assert not in_process._frontend._open

    asyncio.run(main())


@pytest.mark.parametrize("asks", ["generate", "stats"])
def test_an_engine_that_dies_while_it_is_asked_is_heard(model_path: str, asks: str) -> None:
    """The first question, and the engine ends after it was found alive."""

    async def main() -> None:
        engine = AsyncLLM(model_path, **OPTIONS)
        found_alive = engine._require_alive

        def then_dies() -> None:
            found_alive()
            engine._require_alive = found_alive  # type: ignore[method-assign]
            engine._post(EngineDied("it died just then"))

        engine._require_alive = then_dies  # type: ignore[method-assign]
        send = engine._engine.send
        engine._engine.send = lambda message: None  # type: ignore[method-assign]
        question = engine.stats() if asks == "stats" else last_text(engine.generate("a", SHORT))
        with pytest.raises(EngineDeadError, match="just then"):
            await question
        engine._engine.send = send  # type: ignore[method-assign]
        engine.shutdown()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_engine_that_is_killed_leaves_no_question_open(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rooftile.engine.process.KILL_AFTER", 0.1)

    async def main() -> None:
        engine = AsyncLLM(model_path, engine="process", **OPTIONS)
        assert isinstance(engine._engine, EngineProcess)
        os.kill(engine._engine.pid, signal.SIGSTOP)
        question = asyncio.create_task(engine.stats())
        await asyncio.sleep(0)
        await asyncio.get_running_loop().run_in_executor(None, engine.shutdown)
        with pytest.raises(EngineDeadError, match="shut down"):
            await question

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_child_that_dies_is_an_engine_that_died(model_path: str) -> None:
    async def main() -> None:
        engine = AsyncLLM(model_path, engine="process", **OPTIONS)
        assert isinstance(engine._engine, EngineProcess)
        os.kill(engine._engine.pid, signal.SIGSTOP)  # so that it cannot answer first
        task = asyncio.create_task(last_text(engine.generate("victim", LONG)))
        await asyncio.sleep(0)  # the request is on its way
        os.kill(engine._engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await task
        assert not engine.is_alive
        with pytest.raises(EngineDeadError):
            await engine.stats()
        engine.shutdown()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_child_dies_with_its_parent(model_path: str) -> None:
    script = (
        "import os, signal, sys\n"
        "from rooftile.engine.async_llm import AsyncLLM\n"
        "if __name__ == '__main__':\n"
        f"    engine = AsyncLLM({model_path!r}, engine='process', **{OPTIONS!r})\n"
        "    print(engine._engine.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    parent = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    child = int(parent.stdout)
    wait_until(lambda: not _alive(child))


def _alive(pid: int) -> bool:
    try:
        # An orphan may stay a zombie where nobody reaps it.
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_what_loading_raises_in_a_child_is_raised_here() -> None:
    with pytest.raises(ValueError, match="no such file"):
        AsyncLLM("nowhere/model.gguf", engine="process")


def test_unknown_engine_kind() -> None:
    with pytest.raises(ValueError, match="engine is 'thred'"):
        AsyncLLM("x", engine="thred")
