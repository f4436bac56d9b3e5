/* Rounds through staging and result buffers: src/coll/reduce.cpp (combine_staged) and, with -DMOVE,
 * src/coll/move.cpp (move_staged).
 *
 * Checked: whoever reads a buffer finds in it, from beginning to end, the round that it wants; nobody
 * waits for ever. Writing a buffer takes time: it holds TORN meanwhile. DEPTH buffers of each kind;
 * with one less than there are, or without the wait for buffers that others still read (-DNO_WAIT),
 * the model must fail (tools/verify checks that it does).
 */
#ifndef N
#define N 2
#endif
#ifndef DEPTH
#define DEPTH 3
#endif
#ifndef ROUNDS
#define ROUNDS 5
#endif
#define OPS 2
#define TORN 255

/* Words of each rank: the operation that it has arrived at; its steps, equal between operations. */
#define ARRIVED 0
#define STEP 1
byte words[2 * N];
/* Buffers of each rank: which round lies there, operation * ROUNDS + round + 1. */
#define STAGED 0
#define RESULT 1
byte buffers[2 * N * DEPTH];

#define WORD(kind, rank) words[(kind) * N + (rank)]
#define BUFFER(kind, rank, round) buffers[((kind) * N + (rank)) * DEPTH + (round) % DEPTH]
#define VALUE(round) ((op - 1) * ROUNDS + (round) + 1)

inline wait_all(kind, value) {
  byte w = 0;
  do :: w < N -> WORD(kind, w) >= value; w++ :: else -> break od; w = 0
}

inline fill(kind, round) {
  BUFFER(kind, me, round) = TORN;
  BUFFER(kind, me, round) = VALUE(round)
}

/* Reads that buffer of every other rank. */
inline drain(kind, round) {
  byte o = 0;
  do
  :: o < N && o != me ->
       assert(BUFFER(kind, o, round) == VALUE(round));  /* begins */
       assert(BUFFER(kind, o, round) == VALUE(round));  /* ends */
       o++
  :: o < N && o == me -> o++
  :: else -> break
  od; o = 0
}

active [N] proctype Rank() {
  byte me = _pid, op = 1, base = 0, t = 0;
  do
  :: op <= OPS ->
       WORD(ARRIVED, me) = op;
       wait_all(ARRIVED, op);
       fill(STAGED, 0);
       WORD(STEP, me) = base + 1;                                   /* A(0) */
       t = 0;
       do
       :: t < ROUNDS ->
#if defined(MOVE) && !defined(NO_WAIT)
            if :: t > 1 -> wait_all(STEP, base + 2 * t - 1) :: else fi;  /* B(t - 2) */
#endif
            if :: t + 1 < ROUNDS -> fill(STAGED, t + 1) :: else fi;
            WORD(STEP, me) = base + 2 * t + 2;                      /* A(t + 1) */
            wait_all(STEP, base + (t == 0 -> 1 : 2 * t));     /* A(t) */
            drain(STAGED, t);
#ifndef MOVE
            fill(RESULT, t);
#endif
            WORD(STEP, me) = base + 2 * t + 3;                      /* B(t) */
#ifndef MOVE
            if
            :: t > 0 ->
#ifndef NO_WAIT
                 wait_all(STEP, base + 2 * t + 1);            /* B(t - 1) */
#endif
                 drain(RESULT, t - 1)
            :: else
            fi;
#endif
            t++
       :: else -> break
       od;
       base = base + 2 * ROUNDS + 1;
       wait_all(STEP, base);
#ifndef MOVE
       drain(RESULT, ROUNDS - 1);
#endif
       op++
  :: else -> break
  od
}
