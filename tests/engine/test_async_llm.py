"""AsyncLLM: many clients on one loop, the engine on its own thread, messages only."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from rooftile.engine.async_llm import AsyncLLM, EngineDeadError
from rooftile.engine.llm import LLM
from rooftile.engine.params import SamplingParams

LONG = SamplingParams(max_tokens=120, ignore_eos=True, seed=1)
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
OPTIONS = {"dtype": "float32", "random_weights": True, "num_pages": 64, "page_size": 4}


def run(model_path: str, body: Callable[[AsyncLLM], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncLLM(model_path, **OPTIONS) as llm:
            await body(llm)
            for _ in range(200):  # aborts are messages: give the engine its turn
                if (stats := await llm.stats()).kv.in_use == 0:
                    break
            assert stats.kv.in_use == 0
            assert (stats.num_running, stats.num_waiting) == (0, 0)

    asyncio.run(asyncio.wait_for(main(), 60))
    assert not [t for t in threading.enumerate() if t.name == "rooftile-engine"]


async def last_text(stream: AsyncIterator) -> str:  # type: ignore[type-arg]
    text = ""
    async for output in stream:
        assert output.outputs[0].text.startswith(text)
        text = output.outputs[0].text
    assert output.finished
    return text


def test_many_clients_get_what_generate_gives(model_path: str, llm: LLM) -> None:
    prompts = [f"prompt {number}" for number in range(12)]
    expected = [output.outputs[0].text for output in llm.generate(prompts, SHORT)]

    async def body(engine: AsyncLLM) -> None:
        texts = await asyncio.gather(*(last_text(engine.generate(p, SHORT)) for p in prompts))
        assert texts == expected

    run(model_path, body)


def test_leaving_and_cancelling_abort_the_request(model_path: str) -> None:
    async def body(engine: AsyncLLM) -> None:
        async for output in engine.generate("leave", LONG):
            if len(output.outputs[0].token_ids) > 3:
                break
        task = asyncio.create_task(last_text(engine.generate("cancel", LONG)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(await last_text(engine.generate("after", SHORT))) > 0

    run(model_path, body)


def test_abort_ends_the_stream_with_its_reason(model_path: str) -> None:
    async def body(engine: AsyncLLM) -> None:
        output = engine.add_request("abort me", LONG, request_id="mine")
        engine.abort("mine")
        engine.abort("mine")
        engine.abort("never existed")
        seen = [news async for news in engine.follow(output)]
        assert seen[-1].outputs[0].finish_reason == "abort"

    run(model_path, body)


def test_a_result_that_came_before_anyone_looked_is_still_seen(model_path: str) -> None:
    async def body(engine: AsyncLLM) -> None:
        output = engine.add_request("quick", SHORT)
        while not output.finished:
            await asyncio.sleep(0.01)
        assert [news.finished async for news in engine.follow(output)] == [True]

    run(model_path, body)


def test_stop_strings_end_the_engines_work_too(model_path: str) -> None:
    async def body(engine: AsyncLLM) -> None:
        assert engine.tokenizer is not None
        x = engine.tokenizer.encode("x")[-1]
        params = SamplingParams(logit_bias={x: 100.0}, temperature=0, stop="xx", max_tokens=None)
        async for output in engine.generate("a", params):
            last = output
        assert (last.outputs[0].finish_reason, last.outputs[0].text) == ("stop", "")

    run(model_path, body)


def test_refusals_are_immediate(model_path: str) -> None:
    async def body(engine: AsyncLLM) -> None:
        with pytest.raises(ValueError, match="the prompt is empty"):
            engine.add_request([])
        engine.add_request("twice", SHORT, request_id="id")
        with pytest.raises(ValueError, match="request id 'id' is in use"):
            engine.add_request("twice", SHORT, request_id="id")
        engine.abort("id")

    run(model_path, body)


def test_a_dead_engine_says_so_and_nobody_hangs(model_path: str) -> None:
    async def main() -> None:
        engine = AsyncLLM(model_path, **OPTIONS)

        def broken() -> None:
            raise MemoryError("the loop itself broke")

        task = asyncio.create_task(last_text(engine.generate("victim", LONG)))
        await asyncio.sleep(0.05)
        engine._engine._core.step = broken  # type: ignore[assignment]
        with pytest.raises(EngineDeadError, match="the loop itself broke"):
            await task
        assert not engine.is_alive
        with pytest.raises(EngineDeadError):
            engine.add_request("late", SHORT)
        with pytest.raises(EngineDeadError):
            await engine.stats()
        engine.shutdown()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_shutdown_ends_open_requests(model_path: str) -> None:
    async def main() -> None:
        engine = AsyncLLM(model_path, **OPTIONS)
        task = asyncio.create_task(last_text(engine.generate("open", LONG)))
        await asyncio.sleep(0.05)
        engine.shutdown()
        engine.shutdown()
        await task
        with pytest.raises(EngineDeadError, match="shut down"):
            engine.add_request("late", SHORT)

    asyncio.run(asyncio.wait_for(main(), 60))
