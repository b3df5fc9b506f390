"""What of MPyC is replaced stays replaced, and why it had to be. MPyC is loaded in processes of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

PREPARE = """
import asyncio, sys
sys.argv[1:] = ["--no-log"]
import numpy as np
from labeler.field import PrimeField
from workers.winner import mpyc_party
import mpyc.runtime, mpyc.thresha
field = PrimeField(2**59 - 225)
asyncio.set_event_loop(asyncio.new_event_loop())
"""


def printed(code: str) -> list[str]:
    """What a fresh process prints."""
    done = subprocess.run([sys.executable, "-c", PREPARE + code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


ZERO_TEST = """
import itertools, secrets
p, n = field.modulus, 40
runtimes = [mpyc_party.start_runtime(party, field, bits=16) for party in range(3)]
keys = {pair: secrets.token_bytes(16) for pair in itertools.combinations(range(3), 2)}
true_share, true_class = mpyc.thresha.np_pseudorandom_share, mpyc_party.PinnedRuntime
e = [secrets.randbelow(10**9) + 1 for _ in range(n)]
slope = [secrets.randbelow(p) for _ in range(n)]
opened, random_shares = [], []
for runtime in runtimes:
    if BARE:
        runtime.__class__ = mpyc.runtime.Runtime
    mpyc.asyncoro.runtime = mpyc.sectypes.runtime = runtime
    runtime._prss_keys = {pair: key for pair, key in keys.items() if runtime.pid in pair}
    seen, shares = [], []

    def keep(*arguments):
        shares.append(true_share(*arguments))
        return shares[-1]

    async def capture(array, threshold=None, seen=seen):
        seen.append(array.value)
        return type(array)(np.ones(n, dtype=object))

    mpyc.thresha.np_pseudorandom_share, runtime.output = keep, capture
    secure = runtime.SecInt(16, p=p).array
    own = np.array([(a + b * (runtime.pid + 1)) % p for a, b in zip(e, slope)], dtype=object)

    async def test():
        return await runtime.np_is_zero_public(secure(secure.sectype.field.array(own)))

    runtime._loop.run_until_complete(test())
    opened.append(seen[-1])
    random_shares.append(shares[0].value)

# Party 0 stands at x = 1. It knows its own shares E and R and the opened polynomial h. Were h = f_e f_r, then
# h = e r (1-x)^2 + (e R + r E) x (1-x) + E R x^2, and e would be a root of R e^2 - s e + E e r = 0.
solved = 0
for k in range(n):
    h1, h2, h3 = (int(h[k]) for h in opened)
    er = (3 * h1 - 3 * h2 + h3) % p
    E, R = (e[k] + slope[k]) % p, int(random_shares[0][k])
    s = (er + 4 * E * R - h2) * pow(2, -1, p) % p
    solved += (R * e[k] ** 2 - s * e[k] + E * er) % p == 0
print(solved)
"""


def test_the_zero_test_opens_no_polynomial_that_gives_its_argument_away() -> None:
    """Against one curious party. MPyC's own, shown beside it, gives e away to within two candidates every time."""
    assert printed("BARE = True\n" + ZERO_TEST) == ["40"]
    assert printed("BARE = False\n" + ZERO_TEST) == ["0"]


def test_no_module_of_mpyc_can_reach_pickle_once_a_runtime_was_made() -> None:
    code = """
import pickle, types
runtime = mpyc_party.start_runtime(0, field, bits=16)
modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "mpyc"]
print(len(modules) > 10, sum(pickle in vars(module).values() for module in modules))
print(sum(value in (pickle.loads, pickle.load, pickle.Unpickler) for module in modules
          for value in vars(module).values() if callable(value)))
try:
    mpyc.runtime.pickle.loads(pickle.dumps([1]) + bytes(-len(pickle.dumps([1])) % 8))
except Exception as error:
    print(type(error).__name__)
try:
    runtime.transfer(1)
except Exception as error:
    print(type(error).__name__)
"""
    assert printed(code) == ["True", "0", "0", "ProtocolViolation", "ProtocolViolation"]


def test_a_mask_has_all_its_bits_in_the_part_that_one_party_does_not_know() -> None:
    """MPyC's own parts of a number below 2^41 stay below 2^39, which would leave 2^-38 for one comparison."""
    code = """
bounds = []
runtime = mpyc_party.start_runtime(0, field, bits=16)
runtime._prss_keys = {(0, 1): bytes(16), (0, 2): bytes(range(16))}
true = runtime.prfs
runtime.prfs = lambda bound: bounds.append(bound) or true(bound)
shares = runtime._np_randoms(mpyc.finfields.GF(field.modulus), 1000, 1 << 41)
prf = true(1 << 41)[(0, 1)]
print(bounds[0] == 1 << 41, len(shares), int(prf(b"label", (1000,)).max()).bit_length())
"""
    assert printed(code) == ["True", "1000", "41"]


def test_pseudo_random_numbers_are_those_of_the_key_and_the_label() -> None:
    code = """
one, again, other = (mpyc_party._Prf(key, field.modulus) for key in (bytes(16), bytes(16), bytes(15) + b"1"))
draw = lambda prf, label: prf(label, (5, 2)).tolist()
print(draw(one, b"a") == draw(again, b"a"), draw(one, b"a") == draw(other, b"a"), draw(one, b"a") == draw(one, b"b"))
print(max(max(row) for row in draw(one, b"a")) < field.modulus)
"""
    assert printed(code) == ["True", "False", "False", "True"]
