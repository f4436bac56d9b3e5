/* The doorbell of an endpoint and how its threads sleep: src/transport/shm/doorbell.h (knock, rouse),
 * shm_endpoint.cpp (wait, leave_wait, serve), shm_arrivals.cpp (push_task), on os/wait.h.
 *
 * Checked: no wake-up is lost. Every letter is taken by somebody: a request by the thread that serves, a
 * reply by any. The thread that waits ends when its reply was taken, or earlier (its deadline), and nobody
 * sleeps for ever beside a letter (an invalid end state).
 *
 * Memory: a sender's letter goes through a store buffer of one entry, drained at a fence (any atomic
 * read-modify-write) or at any time. All other words are changed by read-modify-writes only.
 *
 * Mutations, each of which must fail (tools/verify): NO_FENCE: the sender looks at the bit before its letter
 * is out. NO_LOOK: the thread that serves does not look again after its announcement. NO_LOOK_WAITER: nor
 * the one that waits. NO_HAND_OVER: who leaves wait() does not look at what it leaves behind. NO_TASK_RING:
 * a request that a waiting thread takes is put aside without a ring.
 */
#ifndef SENDERS
#define SENDERS 2
#endif
#ifndef LETTERS
#define LETTERS 2
#endif

byte written[SENDERS];   /* letters in the rings, as the receiver sees them */
byte buffered[SENDERS];  /* store buffers: 0 = empty, else the count on its way */
byte read[SENDERS];
bool knocked[SENDERS];   /* the bits */
byte awake;              /* threads in wait() that poll */
byte waiters_value, waiters_sleepers;
byte service_value, service_sleepers;
bool waiter_asleep, service_asleep;  /* in futex_wait */
byte tasks;              /* requests put aside for the thread that serves */
bool replied;            /* what the waiting thread waits for */
byte served;             /* requests */
bool lock;               /* ShmEndpoint::mutex_ */
byte finished;           /* senders that are done */

/* Letter k of sender s: the last letter of sender 0 is the reply. */
#define IS_REPLY(s, k) ((s) == 0 && (k) == LETTERS)

inline drain(s) { d_step { if :: buffered[s] != 0 -> written[s] = buffered[s]; buffered[s] = 0 :: else fi } }

inline ring_waiters() {
  if
  :: waiters_sleepers != 0 -> d_step { waiters_value++; waiter_asleep = false }
  :: else
  fi
}
inline ring_service() {
  if
  :: service_sleepers != 0 -> d_step { service_value++; service_asleep = false }
  :: else
  fi
}
inline rouse(reply) {
  if
  :: awake != 0
  :: else ->
     if
     :: reply && waiters_sleepers != 0 -> d_step { waiters_value++; waiter_asleep = false }
     :: else -> ring_service()
     fi
  fi
}

#define ANY_BIT (knocked[0] || knocked[SENDERS - 1])

proctype sender(byte s) {
  byte k = 1;
  bool was;
  do
  :: k <= LETTERS ->
     buffered[s] = k;             /* written.store(release) */
#ifndef NO_FENCE
     drain(s);                    /* full_fence() */
#endif
     was = knocked[s];
     if
     :: !was -> atomic { drain(s); knocked[s] = true }   /* fetch_or */
     :: else
     fi;
     rouse(IS_REPLY(s, k));
     k++
  :: else -> break
  od;
  drain(s);
  finished++
}

/* The hardware empties store buffers when it likes. */
active proctype hardware() {
end: do
  :: buffered[0] != 0 -> drain(0)
#if SENDERS > 1
  :: buffered[1] != 0 -> drain(1)
#endif
  od
}

/* Takes one letter; `moved` tells whether there was one. Under the lock. */
inline poll(serves, moved) {
  byte p = 0;
  moved = false;
  do
  :: p < SENDERS ->
     if
     :: knocked[p] ->
        knocked[p] = false;           /* exchange */
        do                        /* the whole ring: rings that are not empty stay in the queue */
        :: read[p] < written[p] ->
           read[p]++;
           moved = true;
           if
           :: IS_REPLY(p, read[p]) -> replied = true; ring_waiters()
           :: !IS_REPLY(p, read[p]) && serves -> served++
           :: else ->
              tasks++;
#ifndef NO_TASK_RING
              ring_service()
#else
              skip
#endif
           fi
        :: else -> break
        od
     :: else
     fi;
     p++
  :: else -> break
  od; p = 0
}

#define FOR_SERVICE (tasks != 0 || (awake == 0 && ANY_BIT))

active proctype service() {
  byte seen;
  bool moved;
  do
  :: atomic { tasks != 0 -> tasks--; served++ }
  :: tasks == 0 && FOR_SERVICE ->
     atomic { !lock -> lock = true };
     poll(true, moved);
     lock = false
  :: !FOR_SERVICE ->
     service_sleepers++;
     seen = service_value;
     !lock;                       /* taken and let go of: nobody has a letter in his hand */
#ifndef NO_LOOK
     if
     :: FOR_SERVICE -> service_sleepers--
     :: else ->
#else
     if
     :: true ->
#endif
        d_step { if :: service_value == seen -> service_asleep = true :: else fi }
end:    !service_asleep;
        service_sleepers--
     fi
  od
}

/* A thread in wait(): until its reply, or its deadline. */
active proctype waiter() {
  byte seen;
  bool moved;
  if :: replied -> goto out :: else fi;
  awake++;
  do
  :: replied -> break
  :: true -> break                /* the deadline */
  :: !replied && ANY_BIT ->
     atomic { !lock -> lock = true };
     poll(false, moved);
     lock = false
  :: !replied ->
     waiters_sleepers++;
     seen = waiters_value;
     awake--;
     !lock;                       /* taken and let go of: nobody has a letter in his hand */
#ifndef NO_LOOK_WAITER
     if
     :: ANY_BIT || replied
     :: else ->
#else
     if
     :: true ->
#endif
        d_step { if :: waiters_value == seen -> waiter_asleep = true :: else fi }
#ifdef PATIENT
        !waiter_asleep
#else
        if :: !waiter_asleep :: waiter_asleep = false fi   /* woken, or in time for its deadline */
#endif
     fi;
     awake++;
     waiters_sleepers--
  od;
  awake--;
#ifndef NO_HAND_OVER
  if :: ANY_BIT -> rouse(true) :: else fi;
#endif
out:
  skip
}

init {
  byte i = 0;
  atomic { do :: i < SENDERS -> run sender(i); i++ :: else -> break od }
  /* When all is quiet, everything was taken. */
  (finished == SENDERS && served == SENDERS * LETTERS - 1 && replied)
}
