"""The asyncio client behind the sync one's interface, so that one test serves both."""

import asyncio
import inspect
import threading

from fp8kvd import aio


class _Loop:
    """An event loop on a thread of its own. One for all tests: gRPC's loops disturb each other."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def result(self, coroutine, timeout_s=30):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)


class Blocking:
    """Wraps an aio object: what it awaits is waited for, what it returns is wrapped in turn."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        attribute = getattr(self._inner, name)
        if not callable(attribute):
            return attribute

        def call(*arguments, **named):
            async def run():
                result = attribute(*_unwrap(arguments), **_unwrap(named))
                return await result if inspect.isawaitable(result) else result
            return self._wrap(LOOP.result(run()))
        return call

    def result(self, timeout_s=30):
        """Of a future."""
        async def wait():
            return await asyncio.wait_for(self._inner, timeout_s)
        return LOOP.result(wait(), timeout_s + 1)

    def __enter__(self):
        LOOP.result(self._inner.__aenter__())
        return self

    def __exit__(self, *error):
        LOOP.result(self._inner.__aexit__(*error))

    def _wrap(self, result):
        if isinstance(result, list):
            return [self._wrap(item) for item in result]
        if isinstance(result, (aio.Sequence, aio.DecodeStream, asyncio.Future)):
            return Blocking(result)
        return result


def _unwrap(value):
    if isinstance(value, Blocking):
        return value._inner
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_unwrap(item) for item in value)
    if isinstance(value, dict):
        return {key: _unwrap(item) for key, item in value.items()}
    return value


LOOP = _Loop()


def aio_client(*arguments, **named):
    async def make():
        return aio.Client(*arguments, **named)
    return Blocking(LOOP.result(make()))
