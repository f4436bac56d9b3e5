/* The arrival of ranks at an operation, and how a rank that sleeps is woken: src/coll/engine.cpp
 * (arrive), engine_wait.h (wait), engine_wait.cpp (ring_sleepers, Bell::ring, record_failure).
 *
 * Checked: no lost wake-up (every rank ends; a rank asleep for ever is an invalid end state), and
 * when a rank dies every survivor either completes the operation or fails it, all alike.
 *
 * Memory: each rank's store to its own `arrived` goes through a store buffer of one entry, drained at
 * a fence or at any time, as on x86 and weaker machines; all other shared words are only changed by
 * atomic read-modify-writes, which are fences. -DNO_FENCE leaves the fence of ring_sleepers out: the
 * model must then find the lost wake-up; -DNO_CONFIRM lets ranks complete what others may have given
 * up: they must then disagree (tools/verify checks that both do).
 */
#ifndef N
#define N 3
#endif
#ifndef OPS
#define OPS 2
#endif

byte arrived[N];          /* shared memory: the operation each rank has arrived at */
byte buffered[N];         /* store buffers: 0 = empty, else the value on its way */
byte bell;                /* the futex word, modulo 256 */
byte sleepers;
bool asleep[N];           /* in futex_wait */
bool dead[N];
bool alarm[N];            /* the watch thread of each rank has seen the death */
byte failed;              /* the first failed operation, 0: none */
byte completed[N];        /* last operation completed */
bool gave_up[N];
byte doubted;             /* an operation that a rank wants to fail though its flags may yet be set */
byte decided;             /* the last doubted operation that was decided upon, 0: none */
bool decided_failed;      /* and how */

inline drain(r) { d_step { if :: buffered[r] != 0 -> arrived[r] = buffered[r]; buffered[r] = 0 :: else fi } }

/* futex_wake of all */
inline wake_all() {
  d_step {
    bell++;
    byte w = 0;
    do :: w < N -> asleep[w] = false; w++ :: else -> break od; w = 0
  }
}

/* What rank r sees of rank o: its own buffer first. */
#define SEEN(r, o) ((o) == (r) && buffered[o] != 0 -> buffered[o] : arrived[o])

inline look(r, k, all) {
  byte o = 0;
  all = true;
  do
  :: o < N -> if :: SEEN(r, o) < k -> all = false :: else fi; o++
  :: else -> break
  od; o = 0
}

/* Is some rank that has not arrived dead? Death is looked at before the flag, as in wait_all. */
inline blocked(r, k, culprit) {
  byte b = 0;
  culprit = false;
  do
  :: b < N -> if :: dead[b] && SEEN(r, b) < k -> culprit = true :: else fi; b++
  :: else -> break
  od; b = 0
}

proctype rank(byte r) {
  byte k = 1;
  byte seen;
  bool all, culprit;
  do
  :: k <= OPS ->
     if :: failed != 0 && failed <= k -> gave_up[r] = true; goto stop :: else fi;
     buffered[r] = k;                       /* arrived.store(release) */
again:
     look(r, k, all);
     if :: all -> goto done :: else fi;
     /* spinning and yielding are more looks; then announce, fence, look again, sleep */
     d_step { drain(r); sleepers++ }
     seen = bell;
     look(r, k, all);
     if
     :: all -> sleepers--; goto done
     :: !all && (alarm[r] || failed != 0) -> sleepers--
     :: !all && !alarm[r] && failed == 0 ->
        d_step { if :: bell == seen -> asleep[r] = true :: else fi }
        !asleep[r];
        sleepers--
     fi;
     /* give_up_if_hopeless: the reason first, then the flags once more */
     if
     :: alarm[r] || failed != 0 ->
        blocked(r, k, culprit);
        look(r, k, all);
        if
        :: all -> goto done
        :: !all && failed != 0 && failed <= k -> gave_up[r] = true; goto stop
        :: !all && !(failed != 0 && failed <= k) && culprit ->
           d_step { if :: failed == 0 || failed > k -> failed = k :: else fi }
           wake_all();
           gave_up[r] = true; goto stop
        /* give_up_together: the dead rank has arrived, another one has not */
        :: !all && !(failed != 0 && failed <= k) && !culprit && alarm[r] ->
           d_step { if :: doubted < k -> doubted = k :: else fi };
           drain(r);
           look(r, k, all);
           if
           :: all -> goto done
           :: else
           fi;
           d_step { if :: decided < k -> decided = k; decided_failed = true :: else fi };
           if
           :: decided == k && decided_failed ->
              d_step { if :: failed == 0 || failed > k -> failed = k :: else fi }
              wake_all();
              gave_up[r] = true; goto stop
           :: else
           fi
        :: else
        fi
     :: else
     fi;
     goto again;
done:
#ifndef NO_FENCE
     drain(r);
#endif
     if :: sleepers != 0 -> wake_all() :: else fi;
     /* confirm */
     if
     :: doubted >= k ->
#ifndef NO_CONFIRM
        d_step { if :: decided < k -> decided = k; decided_failed = false :: else fi };
        if
        :: decided == k && decided_failed ->
           (failed != 0 && failed <= k) || alarm[r];
           d_step { if :: failed == 0 || failed > k -> failed = k :: else fi }
           wake_all();
           gave_up[r] = true; goto stop
        :: else
        fi
#else
        skip
#endif
     :: else
     fi;
     completed[r] = k;
     k++
  :: else -> break
  od;
stop:
  drain(r)
}

/* The hardware empties store buffers when it likes. */
active proctype hardware() {
end: do
  :: buffered[0] != 0 -> drain(0)
  :: buffered[1] != 0 -> drain(1)
#if N > 2
  :: buffered[2] != 0 -> drain(2)
#endif
  od
}

#ifdef DEATH
/* Kills rank 0 at any moment it has reached; each survivor's watch thread then rings. */
active proctype killer() {
  byte i = 1;
  atomic { dead[0] = true; drain(0) }
  do
  :: i < N -> alarm[i] = true; wake_all(); i++
  :: else -> break
  od
}
#endif

init {
  atomic {
    byte i = 0;
#ifdef DEATH
    /* A dead rank is one that stops anywhere: rank 0 is modelled by its arrivals alone. */
    i = 1;
#endif
    do :: i < N -> run rank(i); i++ :: else -> break od
  }
}

#ifdef DEATH
/* Rank 0 arrives at some operations and then dies. */
active proctype rank0() {
  if
  :: dead[0] -> skip
  :: atomic { !dead[0] -> arrived[0] = 1 }
     if
     :: dead[0] -> skip
     :: atomic { !dead[0] -> arrived[0] = 2 }
     :: skip
     fi
  :: skip
  fi
}
/* Survivors agree: nobody completes what another gave up. */
active proctype monitor() {
end: gave_up[1] && gave_up[N - 1];
  assert(completed[1] == completed[N - 1])
}
#endif
