"""Replays the waits of kernels/flash_hopper_backward.cuh on the CPU, in random order of its warps.

The warps of a block are generators that give way at each step. Barriers count as the hardware does: a named
barrier opens at its number of arrivals, whoever they are from; an mbarrier waits for a phase by its parity. A
schedule fails if warps wait forever, if one arrives twice in a phase of a named barrier, or if shared memory does
not hold what a GEMM or a copy reads. Each of NEEDED is left out in turn: some schedule must then fail.
"""

import random
import sys

STAGES, DSCORES, LONGEST = 2, 3, 7
NEEDED = ("turn", "last dS", "place of dK", "q empty", "dout empty", "keys empty", "gradients have left")


class Fault(Exception):
    pass


class Named:
    """A named barrier. Weights count warps."""

    def __init__(self, warps):
        self.warps, self.arrived, self.who, self.phase = warps, 0, set(), 0

    def arrive(self, who, weight):
        if who in self.who:
            raise Fault(f"{who} arrives twice")
        self.who.add(who)
        self.arrived += weight
        if self.arrived == self.warps:
            self.arrived, self.who, self.phase = 0, set(), self.phase + 1

    def sync(self, who, weight):
        phase = self.phase
        self.arrive(who, weight)
        while self.phase == phase:
            yield


class Counted:
    """An mbarrier."""

    def __init__(self, arrivals):
        self.arrivals, self.left, self.copies, self.phase = arrivals, arrivals, 0, 0

    def arrive(self):
        if self.left == 0:
            raise Fault("too many arrivals at an mbarrier")
        self.left -= 1
        self.flip()

    def flip(self):
        if self.left == 0 and self.copies == 0:
            self.left, self.phase = self.arrivals, self.phase + 1

    def wait(self, parity):
        while self.phase % 2 == parity:
            yield


class Block:
    """One block. tasks[i] is the number of query tiles of its task i, which may be 0."""

    def __init__(self, tasks, seed, without):
        self.tasks, self.random, self.without = tasks, random.Random(seed), without
        self.copies = []  # under way
        self.keys_full, self.keys_empty = Counted(1), Counted(2)
        self.q_full, self.dout_full = ([Counted(1) for _ in range(STAGES)] for _ in range(2))
        self.q_empty, self.dout_empty = ([Counted(2) for _ in range(STAGES)] for _ in range(2))
        self.task_full, self.task_empty = ([Counted(n) for _ in range(2)] for n in (1, 5))
        self.dq_full, self.dq_empty = ([Named(5) for _ in range(2)] for _ in range(2))
        self.turn, self.dscores_full = [Named(8) for _ in range(2)], Named(8)
        self.task, self.keys = [None] * 2, None
        self.q, self.dout = [None] * STAGES, [None] * STAGES
        self.dscores = [[None, None] for _ in range(DSCORES)]  # [buffer][warpgroup]
        self.share, self.added = [None, None], [[], []]  # of dQ

    def wait(self, name, steps):
        if name != self.without:
            yield from steps

    def work(self):
        for _ in range(self.random.randrange(6)):
            yield

    def expect(self, barrier, write):
        """Starts a copy that writes later, and arrives."""

        def finish():
            write()
            barrier.copies -= 1
            barrier.flip()

        barrier.copies += 1
        self.copies.append(finish)
        barrier.arrive()

    def task_at(self, count):
        yield from self.task_full[count % 2].wait(count // 2 % 2)
        task = self.task[count % 2]
        self.task_empty[count % 2].arrive()
        return task

    def publish(self, count, task):
        yield from self.task_empty[count % 2].wait(count // 2 % 2 ^ 1)
        self.task[count % 2] = task
        self.task_full[count % 2].arrive()

    def load(self, task, tile, number, full, empty, name, tensor):
        stage = number % STAGES
        yield from self.wait(name, empty[stage].wait(number // STAGES % 2 ^ 1))
        self.expect(full[stage], lambda: tensor.__setitem__(stage, (task, tile)))
        yield

    def load_queries(self):
        count = number = 0
        while (task := (yield from self.task_at(count))) < len(self.tasks):
            yield from self.wait("keys empty", self.keys_empty.wait(count % 2 ^ 1))
            self.expect(self.keys_full, lambda task=task: setattr(self, "keys", task))
            for tile in range(self.tasks[task]):
                yield from self.load(task, tile, number, self.q_full, self.q_empty, "q empty", self.q)
                number += 1
            count += 1

    def load_gradients(self):
        task = number = 0
        yield from self.publish(0, task)
        while task < len(self.tasks):
            for tile in range(self.tasks[task]):
                yield from self.load(
                    task, tile, number, self.dout_full, self.dout_empty, "dout empty", self.dout
                )
                number += 1
            task += 1
            yield from self.publish(task, task)

    def add_tiles(self, group):
        count, me = 0, "adder"
        while (task := (yield from self.task_at(count))) < len(self.tasks):
            for _ in range(self.tasks[task]):
                self.dq_empty[group].arrive(me, 1)
                yield from self.dq_full[group].sync(me, 1)
                tile = self.share[group]
                yield from self.work()
                self.holds(self.share[group], tile)
                self.added[group].append(tile)
            self.dq_empty[group].arrive(me, 1)
            if self.without != "place of dK":
                yield from self.dq_full[group].sync(me, 1)
            count += 1

    def holds(self, memory, wanted):
        if memory != wanted:
            raise Fault(f"memory has {memory}, wanted {wanted}")

    def stage_dq(self, group, me, tile):
        yield from self.dq_empty[group].sync(me, 4)
        self.share[group] = tile
        yield
        self.dq_full[group].arrive(me, 4)

    def multiply_tiles(self, group):
        count = number = buffer = 0
        me, leaving = "warpgroup", []  # gradients that a copy still reads

        def reads_dscores(tile):
            self.holds(self.dscores[buffer - 1], [tile, tile])

        while (task := (yield from self.task_at(count))) < len(self.tasks):
            tiles = self.tasks[task]
            yield from self.keys_full.wait(count % 2)
            if group == 1 and tiles:
                self.turn[0].arrive(f"{me} 1", 4)
            if self.without != "gradients have left":
                leaving = []
            for tile in range(tiles):
                stage, parity = number % STAGES, number // STAGES % 2
                yield from self.q_full[stage].wait(parity)
                yield from self.dout_full[stage].wait(parity)
                yield from self.work()
                self.holds((self.keys, self.q[stage], self.dout[stage]), (task, (task, tile), (task, tile)))
                self.write_dscores(buffer, group, (task, tile), leaving)
                yield from self.wait("turn", self.turn[group].sync(f"{me} {group}", 4))
                for _ in range(2):  # at the start and at the end of dV, dK and dQ
                    self.holds((self.q[stage], self.dout[stage]), ((task, tile), (task, tile)))
                    if tile > 0:
                        reads_dscores((task, tile - 1))
                    yield from self.work()
                self.dout_empty[stage].arrive()
                self.q_empty[stage].arrive()
                number += 1
                if self.without != "turn" and (group == 0 or tile + 1 < tiles):
                    self.turn[group ^ 1].arrive(f"{me} {group}", 4)
                if tile > 0:
                    yield from self.stage_dq(group, me, (task, tile - 1))
                buffer = (buffer + 1) % DSCORES
            if tiles:
                yield from self.wait("last dS", self.dscores_full.sync(f"{me} {group}", 4))
                reads_dscores((task, tiles - 1))
                yield from self.work()
                reads_dscores((task, tiles - 1))
            self.holds(self.keys, task)
            self.keys_empty.arrive()
            if tiles:
                yield from self.stage_dq(group, me, (task, tiles - 1))
            yield from self.dq_empty[group].sync(me, 4)
            if self.without != "place of dK":
                self.dq_full[group].arrive(me, 4)
            leaving = [buffer, (buffer + 1) % DSCORES]
            for each in leaving:
                self.dscores[each][group] = ("dV", task)
            self.share[group] = ("dK", task)
            count += 1

    def write_dscores(self, buffer, group, tile, leaving):
        if buffer in leaving:
            raise Fault("dS overwrites a gradient that a copy reads")
        self.dscores[buffer][group] = tile

    def run(self):
        warps = [self.load_queries(), self.load_gradients()]
        warps += [part(group) for part in (self.add_tiles, self.multiply_tiles) for group in (0, 1)]
        speed = {warp: self.random.choice((1, 1, 5, 20)) for warp in warps}
        idle = 0
        while warps:
            if self.copies and self.random.random() < 0.2:
                self.copies.pop(self.random.randrange(len(self.copies)))()
                idle = 0
            warp = self.random.choices(warps, [speed[each] for each in warps])[0]
            state = self.state()
            try:
                next(warp)
            except StopIteration:
                warps.remove(warp)
            idle = 0 if state != self.state() else idle + 1
            if idle > 2000 and not self.copies:
                raise Fault("warps wait forever")
        wanted = [(task, tile) for task, tiles in enumerate(self.tasks) for tile in range(tiles)]
        self.holds(self.added, [wanted, wanted])

    def state(self):
        named = [*self.dq_full, *self.dq_empty, *self.turn, self.dscores_full]
        counted = [
            self.keys_full,
            self.keys_empty,
            *self.q_full,
            *self.q_empty,
            *self.dout_full,
            *self.dout_empty,
        ]
        counted += [*self.task_full, *self.task_empty]
        return [b.phase + b.arrived / 100 for b in named], [b.phase + b.left / 100 for b in counted]


def first_fault(schedules, without=None):
    for seed in range(schedules):
        chance = random.Random(seed)
        tasks = [chance.choice((0, 0, *range(1, STAGES + 2), LONGEST)) for _ in range(chance.randrange(1, 7))]
        try:
            Block(tasks, seed, without).run()
        except Fault as fault:
            return f"schedule {seed}, tasks {tasks}: {fault}"
    return None


def main():
    faults = [fault for fault in [first_fault(150)] if fault]
    faults += [f"no schedule misses the wait '{name}'" for name in NEEDED if not first_fault(300, name)]
    print("\n".join(faults) or "every schedule ends, and every wait is needed")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
