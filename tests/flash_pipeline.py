"""Replays the waits of kernels/flash_hopper_forward.cuh and flash_hopper_backward.cuh on the CPU, with the warps of a
block in random order.

Warps are generators that yield after each step. Barriers count as the hardware does: a named barrier opens after its
number of arrivals from any warps; an mbarrier waits for a phase by its parity. A schedule fails if warps wait forever,
if a warp arrives twice in a phase of a named barrier, or if shared memory does not hold the data that a GEMM or a copy
reads. Each wait in NEEDED is left out in turn, and then some schedule must fail.
"""

import random
import sys

LONGEST = 7  # tiles of a task


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

    def state(self):
        return self.phase + self.arrived / 100

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

    def state(self):
        return self.phase + self.left / 100

    def wait(self, parity):
        while self.phase % 2 == parity:
            yield


class Block:
    """One block of a kernel. Its tasks are numbered from 0. Subclasses add the warps."""

    def __init__(self, tasks, seed, without, warps_with_tasks):
        self.tasks, self.random, self.without = tasks, random.Random(seed), without
        self.copies = []  # under way
        self.task_full, self.task_empty = ([Counted(n) for _ in range(2)] for n in (1, warps_with_tasks))
        self.task = [None] * 2

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

    def holds(self, memory, wanted):
        if memory != wanted:
            raise Fault(f"memory has {memory}, wanted {wanted}")

    def run(self):
        warps = self.warps()
        speed = {warp: self.random.choice((1, 1, 5, 20)) for warp in warps}
        barriers = [*self.barriers(), *self.task_full, *self.task_empty]
        idle = 0
        while warps:
            if self.copies and self.random.random() < 0.2:
                self.copies.pop(self.random.randrange(len(self.copies)))()
                idle = 0
            warp = self.random.choices(warps, [speed[each] for each in warps])[0]
            state = [barrier.state() for barrier in barriers]
            try:
                next(warp)
            except StopIteration:
                warps.remove(warp)
            idle = 0 if state != [barrier.state() for barrier in barriers] else idle + 1
            if idle > 2000 and not self.copies:
                raise Fault("warps wait forever")
        self.judge()

    def task_at(self, count):
        yield from self.task_full[count % 2].wait(count // 2 % 2)
        task = self.task[count % 2]
        self.task_empty[count % 2].arrive()
        return task

    def publish(self, count, task):
        yield from self.wait("task empty", self.task_empty[count % 2].wait(count // 2 % 2 ^ 1))
        self.task[count % 2] = task
        self.task_full[count % 2].arrive()

    def load(self, task, tile, number, full, empty, name, tensor):
        stage = number % len(full)
        yield from self.wait(name, empty[stage].wait(number // len(full) % 2 ^ 1))
        self.expect(full[stage], lambda: tensor.__setitem__(stage, (task, tile)))
        yield


class Forward(Block):
    """flash_hopper_forward.cuh. tasks[i] has the number of key tiles that each warpgroup of task i sees. If `parts`,
    the block ends with its share of a tile, else with the last task."""

    NEEDED = ("q empty", "k empty", "v empty", "task empty", "parts start")

    def __init__(self, tasks, seed, without):
        self.groups, self.turns, self.stages, self.parts, tasks = tasks
        super().__init__(tasks, seed, without, self.groups)
        self.q_full, self.q_empty = Counted(1), Counted(self.groups)
        self.k_full, self.v_full = ([Counted(1) for _ in range(self.stages)] for _ in range(2))
        self.k_empty, self.v_empty = ([Counted(self.groups) for _ in range(self.stages)] for _ in range(2))
        self.turn, self.parts_start = [Named(8) for _ in range(self.groups)], Named(4 * self.groups)
        self.q, self.k, self.v = None, [None] * self.stages, [None] * self.stages
        self.done = [[] for _ in range(self.groups)]

    @classmethod
    def draw(cls, chance):
        """Under a causal mask a later warpgroup sees as many tiles or more. After the last query it sees none."""
        groups, stages, parts = chance.choice((1, 2, 3)), chance.choice((2, 4)), chance.random() < 0.3
        turns = groups > 1 and chance.random() < 0.7
        tasks = []
        for _ in range(1 if parts else chance.randrange(1, 7)):
            tiles = sorted(chance.choice((0, *range(1, stages + 2), LONGEST)) for _ in range(groups))
            rest = chance.randrange(1, groups + 1)
            tasks.append(tiles[:rest] + [chance.choice((tiles[rest - 1], 0))] * (groups - rest))
        return groups, turns, stages, parts, tasks

    def load_tiles(self):
        number = turn = 0
        for task in range(len(self.tasks)):
            tiles = max(self.tasks[task])
            for tile in range(tiles + 1 if tiles else 0):
                if tile < tiles:
                    yield from self.load(
                        task, tile, number + tile, self.k_full, self.k_empty, "k empty", self.k
                    )
                if tile == 0:
                    yield from self.wait("q empty", self.q_empty.wait(turn % 2 ^ 1))
                    self.expect(self.q_full, lambda task=task: setattr(self, "q", task))
                    turn += 1
                else:
                    before = tile - 1
                    yield from self.load(
                        task, before, number + before, self.v_full, self.v_empty, "v empty", self.v
                    )
            number += tiles
            yield from self.publish(task, task + 1)

    def attend(self, group):
        task = number = turn = 0
        me, turns = f"warpgroup {group}", self.turn
        k, v = 0, 0  # tiles so far

        def take_turn():
            if self.turns:
                yield from turns[group].sync(me, 4)
                turns[(group + 1) % self.groups].arrive(me, 4)

        def ready(full, at):
            yield from full[at % self.stages].wait(at // self.stages % 2)

        if self.turns and group == self.groups - 1:
            turns[0].arrive(me, 4)
        while task < len(self.tasks):
            most, tiles = max(self.tasks[task]), self.tasks[task][group]
            if self.parts and tiles == 0:
                self.parts_start.arrive(me, 4)
            if most:
                yield from self.q_full.wait(turn % 2)
                turn += 1
                for left in range(most, tiles, -1):
                    for full, empty in ((self.k_full, self.k_empty), (self.v_full, self.v_empty)):
                        yield from ready(full, k)
                        empty[k % self.stages].arrive()
                    k, v = k + 1, v + 1
                    if left > 1:
                        yield from take_turn()
            for tile in range(most - tiles, most):
                first = tile == most - tiles
                yield from ready(self.k_full, k)
                if not first:
                    yield from take_turn()
                    yield from ready(self.v_full, v)
                for _ in range(2):  # at the start and at the end of S and of O of the tile before
                    self.holds((self.q, self.k[k % self.stages]), (task, (task, tile)))
                    if not first:
                        self.holds(self.v[v % self.stages], (task, tile - 1))
                    yield from self.work()
                self.k_empty[k % self.stages].arrive()
                k += 1
                if not first:
                    self.v_empty[v % self.stages].arrive()
                    v += 1
            if most:
                self.q_empty.arrive()
            if tiles:
                yield from ready(self.v_full, v)
                for _ in range(2):
                    self.holds(self.v[v % self.stages], (task, most - 1))
                    yield from self.work()
                self.v_empty[v % self.stages].arrive()
                v += 1
                if self.parts:
                    yield from self.wait("parts start", self.parts_start.sync(me, 4))
                    self.k, self.v = (["a part"] * self.stages for _ in range(2))
            self.done[group].append(task)
            task = yield from self.task_at(number)
            number += 1

    def warps(self):
        return [self.load_tiles(), *(self.attend(group) for group in range(self.groups))]

    def barriers(self):
        rings = [*self.k_full, *self.k_empty, *self.v_full, *self.v_empty]
        return [self.q_full, self.q_empty, *rings, *self.turn, self.parts_start]

    def judge(self):
        self.holds(self.done, [list(range(len(self.tasks)))] * self.groups)


class Backward(Block):
    """flash_hopper_backward.cuh. tasks[i] is the number of query tiles of task i, which may be 0."""

    STAGES, DSCORES = 2, 3
    NEEDED = ("turn", "last dS", "place of dK", "q empty", "dout empty", "keys empty", "gradients have left")

    def __init__(self, tasks, seed, without):
        super().__init__(tasks, seed, without, 5)
        self.keys_full, self.keys_empty = Counted(1), Counted(2)
        self.q_full, self.dout_full = ([Counted(1) for _ in range(self.STAGES)] for _ in range(2))
        self.q_empty, self.dout_empty = ([Counted(2) for _ in range(self.STAGES)] for _ in range(2))
        self.dq_full, self.dq_empty = ([Named(5) for _ in range(2)] for _ in range(2))
        self.turn, self.dscores_full = ([Named(8) for _ in range(2)] for _ in range(2))
        self.keys = None
        self.q, self.dout = [None] * self.STAGES, [None] * self.STAGES
        self.dscores = [[None, None] for _ in range(self.DSCORES)]  # [buffer][warpgroup]
        self.share, self.added = [None, None], [[], []]  # of dQ

    @classmethod
    def draw(cls, chance):
        lengths = (0, 0, *range(1, cls.STAGES + 2), LONGEST)
        return [chance.choice(lengths) for _ in range(chance.randrange(1, 7))]

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
                stage, parity = number % self.STAGES, number // self.STAGES % 2
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
                buffer = (buffer + 1) % self.DSCORES
            if tiles:
                self.dscores_full[group ^ 1].arrive(f"{me} {group}", 4)
                yield from self.wait("last dS", self.dscores_full[group].sync(f"{me} {group}", 4))
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
            leaving = [buffer, (buffer + 1) % self.DSCORES]
            for each in leaving:
                self.dscores[each][group] = ("dV", task)
            self.share[group] = ("dK", task)
            count += 1

    def write_dscores(self, buffer, group, tile, leaving):
        if buffer in leaving:
            raise Fault("dS overwrites a gradient that a copy reads")
        self.dscores[buffer][group] = tile

    def warps(self):
        parts = [part(group) for part in (self.add_tiles, self.multiply_tiles) for group in (0, 1)]
        return [self.load_queries(), self.load_gradients(), *parts]

    def barriers(self):
        named = [*self.dq_full, *self.dq_empty, *self.turn, *self.dscores_full]
        counted = [*self.q_full, *self.q_empty, *self.dout_full, *self.dout_empty]
        return [*named, self.keys_full, self.keys_empty, *counted]

    def judge(self):
        wanted = [(task, tile) for task, tiles in enumerate(self.tasks) for tile in range(tiles)]
        self.holds(self.added, [wanted, wanted])


def first_fault(kernel, schedules, without=None):
    for seed in range(schedules):
        tasks = kernel.draw(random.Random(seed))
        try:
            kernel(tasks, seed, without).run()
        except Fault as fault:
            return f"{kernel.__name__}, schedule {seed}, tasks {tasks}: {fault}"
    return None


def main():
    faults = []
    for kernel in (Forward, Backward):
        faults += [fault for fault in [first_fault(kernel, 150)] if fault]
        faults += [
            f"{kernel.__name__}: no schedule misses the wait '{name}'"
            for name in kernel.NEEDED
            if not first_fault(kernel, 300, name)
        ]
    print("\n".join(faults) or "every schedule ends, and every wait is needed")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
