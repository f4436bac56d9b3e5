/* The doorbell of an endpoint and how its threads sleep: src/transport/shm/doorbell.h (announce_letter, rouse,
 * ring_once, Nap), shm_threads.cpp (wait, leave_wait, serve), shm_arrivals.cpp (push_task, set_watched).
 *
 * Checked: no wake-up is lost. Every letter is taken by somebody: a request by the thread that serves, a
 * reply by any. The thread that waits ends when its reply was taken, or earlier (its deadline), and nobody
 * sleeps for ever beside a letter (an invalid end state).
 *
 * Memory: a sender's letter goes through a store buffer of one entry, drained at a fence (any atomic
 * read-modify-write) or at any time. All other words are changed by read-modify-writes only.
 *
 * One ring may be watched: its sender does not knock while somebody is awake who looks at it. Which one is
 * changed at any time by who holds the lock. With -DLINGER the thread that serves may linger: it sleeps for a
 * moment at a time, and threads in wait() need not say that they are there. With -DBUSY the first request that
 * the thread that serves runs does not return before the reply was taken: the thread that waits has to take it.
 *
 * With -DEPOLL the thread that serves sleeps on epoll (descriptors.h): a ring writes to an eventfd, which stays
 * written until the thread has read it, after it woke and before it looks.
 *
 * Mutations, each of which must fail (tools/verify): NO_FENCE: the sender looks at the doorbell before its
 * letter is out. NO_LOOK: the thread that serves does not look again after its announcement. NO_LOOK_WAITER:
 * nor the one that waits. NO_HAND_OVER: who leaves wait() does not look at what it leaves behind. NO_TASK_RING:
 * a request that a waiting thread takes is put aside without a ring. NO_OLD_LOOK: who watches another ring
 * does not look at the one before. NO_WATCH_LOOK: nor does who is about to sleep look at the one that is
 * watched. NO_SLEEPERS: a sender of a reply trusts the thread that serves although somebody sleeps in wait().
 * NO_COUNT: naps are not counted, though a sender does not ring twice for one count. NO_INSIDE: lingering ends
 * although somebody in wait() counts on it. LINGER_ALL: a request is not told either while somebody lingers,
 * and moments never end (the thread that serves is late). DRAIN_LATE: the eventfd is read before the sleep.
 * FUTEX_RING: a ring does not write to it.
 */
#ifndef SENDERS
#define SENDERS 2
#endif
#ifndef LETTERS
#define LETTERS 2
#endif
#ifndef CHANGES
#define CHANGES 2
#endif
#define NONE 9

byte written[SENDERS];   /* letters in the rings, as the receiver sees them */
byte buffered[SENDERS];  /* store buffers: 0 = empty, else the count on its way */
byte read[SENDERS];
bool knocked[SENDERS];   /* the bits */
bool queued[SENDERS];    /* in the receiver's queue of rings to read: Backlog::rings_ */
byte awake;              /* threads in wait() that poll */
byte watched = NONE;     /* the sender whose ring is watched */
/* Of the words' values only this matters: whether they are what somebody has seen or left. */
byte waiters_sleepers, service_sleepers;
bool waiters_same[SENDERS + 1];  /* as the last ring of each sender, or of the receiver's threads, left it */
bool service_same[SENDERS + 1];
bool waiters_seen, service_seen; /* as at the announcement of the one that sleeps */
#define OWN SENDERS
bool waiter_asleep, service_asleep;  /* in futex_wait */
bool token;              /* the eventfd was written to */
byte tasks;              /* requests put aside for the thread that serves */
bool replied;            /* what the waiting thread waits for */
byte served;             /* requests */
bool lock;               /* ShmEndpoint::mutex_ */
byte finished;           /* senders that are done */
bool lingers;            /* Doorbell::lingers and Lingering::on_ */
bool ending;             /* Lingering::on_ is false, lingers is not yet */
byte inside;             /* threads in wait() that count on it */
byte changes;            /* of the watched ring */

/* Letter k of sender s: the last letter of sender 0 is the reply. */
#define IS_REPLY(s, k) ((s) == 0 && (k) == LETTERS)
#define HAS(s) (read[s] < written[s])
#define ANY_BIT (knocked[0] || knocked[SENDERS - 1] || queued[0] || queued[SENDERS - 1])
#ifndef NO_WATCH_LOOK
#define SEES_WATCHED ((watched == 0 && HAS(0)) || (watched == SENDERS - 1 && HAS(SENDERS - 1)))
#else
#define SEES_WATCHED false
#endif
#define ATTENDED (awake != 0 || inside != 0)

inline drain(s) { d_step { if :: buffered[s] != 0 -> written[s] = buffered[s]; buffered[s] = 0 :: else fi } }

#define CHANGE(same, seen) same[0] = false; same[SENDERS - 1] = false; same[OWN] = false; seen = false

#if defined(EPOLL) && !defined(FUTEX_RING)
#define WAKE_SERVICE token = true
#else
#define WAKE_SERVICE service_asleep = false
#endif

/* ring_once(). */
inline ring_waiters(who) {
  if
  :: waiters_sleepers != 0 ->
     if
     :: waiters_same[who]
     :: else -> d_step { CHANGE(waiters_same, waiters_seen); waiters_same[who] = true; waiter_asleep = false }
     fi
  :: else
  fi
}
inline ring_service(who) {
  if
  :: service_sleepers != 0 ->
     if
     :: service_same[who]
     :: else -> d_step { CHANGE(service_same, service_seen); service_same[who] = true; WAKE_SERVICE }
     fi
  :: else
  fi
}
#ifdef LINGER_ALL
#define NOT_TOLD(reply) (lingers)
#else
#define NOT_TOLD(reply) ((reply) && lingers)
#endif
inline rouse(reply, who) {
  if
  :: awake != 0
  :: else ->
     if
     :: reply && waiters_sleepers != 0 -> ring_waiters(who)
     :: else ->
        if
        :: NOT_TOLD(reply)
        :: else -> ring_service(who)
        fi
     fi
  fi
}

proctype sender(byte s) {
  byte k = 1;
  bool was, skip_it, reply;
  do
  :: k <= LETTERS ->
     reply = IS_REPLY(s, k);
     buffered[s] = k;             /* written.store(release) */
#ifndef NO_FENCE
     drain(s);                    /* full_fence() */
#endif
     skip_it = false;             /* is_watched(), load by load */
     if
     :: watched == s ->
        if
        :: awake != 0 -> skip_it = true
        :: else ->
           if
#ifndef NO_SLEEPERS
           :: reply && waiters_sleepers != 0
#endif
           :: else ->
              if
              :: NOT_TOLD(reply) -> skip_it = true
              :: else -> skip_it = (service_sleepers == 0)
              fi
           fi
        fi
     :: else
     fi;
     if
     :: !skip_it ->
        was = knocked[s];
        if
        :: !was -> atomic { drain(s); knocked[s] = true }   /* fetch_or */
        :: else
        fi;
        rouse(reply, s)
     :: else
     fi;
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

/* One round under the lock: clears bits, reads rings, watches another ring perhaps. */
inline poll(serves) {
  byte p = 0, q = NONE;
  do
  :: p < SENDERS ->
     if
     :: knocked[p] -> atomic { knocked[p] = false; queued[p] = true }  /* exchange, enqueue */
     :: else
     fi;
     if
     :: watched == p && HAS(p) -> queued[p] = true
     :: else
     fi;
     if
     :: queued[p] ->
        do                        /* has_letter() after the bit was cleared */
        :: HAS(p) ->
           read[p]++;
           if
           :: IS_REPLY(p, read[p]) -> replied = true; ring_waiters(OWN)
           :: !IS_REPLY(p, read[p]) && serves -> served++; handled = true
           :: else ->
              tasks++;
#ifndef NO_TASK_RING
              ring_service(OWN)
#else
              skip
#endif
           fi
        :: else -> queued[p] = false; break
        od
     :: else
     fi;
     p++
  :: else -> break
  od;
  if                              /* set_watched() */
  :: changes < CHANGES ->
     changes++;
     q = watched;
     if :: watched = 0 :: watched = SENDERS - 1 :: watched = NONE fi;
#ifndef NO_OLD_LOOK
     if
     :: q != NONE -> if :: HAS(q) -> queued[q] = true :: else fi
     :: else
     fi
#endif
  :: true
  fi;
  p = 0; q = NONE
}

#define FOR_SERVICE (tasks != 0 || (!ATTENDED && (ANY_BIT || SEES_WATCHED)))

#ifdef NO_COUNT
#define COUNT_NAP(same, seen) skip
#else
#define COUNT_NAP(same, seen) d_step { CHANGE(same, seen) }
#endif

active proctype service() {
  bool handled = false;
  do
  :: atomic { tasks != 0 -> tasks--; served++; handled = true }
  :: tasks == 0 && FOR_SERVICE ->
     atomic { !lock -> lock = true };
     poll(true);
     lock = false
  :: !FOR_SERVICE ->
#ifdef LINGER
     /* Lingering::begin() and end_moment(), as it likes. */
     if
     :: !lingers -> lingers = true
     :: lingers ->
        ending = true;
        if
#ifndef NO_INSIDE
        :: inside != 0 -> ending = false
#endif
        :: else -> lingers = false; ending = false
        fi
     :: true
     fi;
#endif
     service_sleepers++;
     atomic { COUNT_NAP(service_same, service_seen); service_seen = true };
     !lock;                       /* taken and let go of: nobody has a letter in his hand */
#ifndef NO_LOOK
     if
     :: FOR_SERVICE
     :: else ->
#else
     if
     :: true ->
#endif
#ifdef EPOLL
#ifdef DRAIN_LATE
        token = false;
#endif
        service_asleep = true;
end:    if
        :: token -> service_asleep = false
#else
        d_step { if :: service_seen -> service_asleep = true :: else fi }
end:    if
        :: !service_asleep
#endif
#if defined(LINGER) && !defined(LINGER_ALL)
        :: lingers -> service_asleep = false   /* a moment has passed */
#endif
        fi
     fi;
#if defined(EPOLL) && !defined(DRAIN_LATE)
     token = false;
#endif
     COUNT_NAP(service_same, service_seen);
     service_sleepers--
#ifdef BUSY
  :: handled -> handled = false; (replied)
#endif
  od
}

/* A thread in wait(): until its reply, or its deadline. */
active proctype waiter() {
  bool counts = false, handled = false;
  if :: replied -> goto out :: else fi;
#define ENTER                                                                     \
  if                                                                              \
  :: lingers && !ending ->                                                        \
     inside++;                                                                    \
     if                                                                           \
     :: lingers && !ending -> counts = true                                       \
     :: else -> inside--; counts = false; awake++                                 \
     fi                                                                           \
  :: else -> counts = false; awake++                                              \
  fi
#define LEAVE if :: counts -> inside-- :: else -> awake-- fi
  ENTER;
  do
  :: replied -> break
#ifndef PATIENT
  :: true -> break                /* the deadline */
#endif
  :: !replied && (ANY_BIT || SEES_WATCHED) ->
     atomic { !lock -> lock = true };
     poll(false);
     lock = false
  :: !replied ->
     waiters_sleepers++;
     atomic { COUNT_NAP(waiters_same, waiters_seen); waiters_seen = true };
     LEAVE;
     !lock;                       /* taken and let go of: nobody has a letter in his hand */
#ifndef NO_LOOK_WAITER
     if
     :: ANY_BIT || SEES_WATCHED || replied
     :: else ->
#else
     if
     :: true ->
#endif
        d_step { if :: waiters_seen -> waiter_asleep = true :: else fi }
#ifdef PATIENT
        !waiter_asleep
#else
        if :: !waiter_asleep :: waiter_asleep = false fi   /* woken, or in time for its deadline */
#endif
     fi;
     ENTER;
     COUNT_NAP(waiters_same, waiters_seen);
     waiters_sleepers--
  od;
#ifndef NO_HAND_OVER
  if
  :: counts -> inside--           /* who lingers looks */
  :: else ->
     awake--;
     if :: ANY_BIT || SEES_WATCHED -> rouse(true, OWN) :: else fi
  fi;
#else
  LEAVE;
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
