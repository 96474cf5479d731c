"""Actors: a class that lives in one process, with calls of its methods answered in order, or at once if they await."""

import asyncio
import os

import ray


@ray.remote
class Counter:
    def __init__(self, start):
        self.value = start

    def add(self, amount):
        self.value += amount
        return self.value

    def pid(self):
        return os.getpid()


@ray.remote(max_restarts=1)
class Meeting:
    def __init__(self, guests):
        self.guests, self.all_there = guests, asyncio.Event()

    async def join(self):
        self.guests -= 1
        if self.guests == 0:
            self.all_there.set()
        await self.all_there.wait()
        return "met"


counter = Counter.remote(10)
calls = [counter.add.remote(1), counter.add.remote(2)]
assert ray.get(calls) == [11, 13]
assert ray.get(counter.pid.remote()) != os.getpid()
assert ray.get(counter.pid.remote()) == ray.get(counter.pid.remote())
meeting = Meeting.remote(3)
assert ray.get([meeting.join.remote() for _ in range(3)], timeout=60) == ["met"] * 3
ray.kill(meeting)
