/* How producers of a queue wait for a free slot: src/share/queue_memory.cpp (put, take, finish). An item that
 * was taken has left the queue, but its slot is free only when its taker is done with it, which it says
 * without the lock. So a producer may find room in the queue and no slot; it says so (starved), and who
 * frees a slot rings for it.
 *
 * Checked: no producer sleeps for ever while it could put (an invalid end state); and that those without a slot
 * do not keep each other awake: with SPIN nobody frees one, and who was woken RINGS times is an error.
 *
 * Without the lock: freeing a slot, and then looking at `starved`; the look at the futex's value when going to
 * sleep; and the ring itself. NO_LOOK: who announces that it is
 * starved does not look for a slot once more. NO_RING: who frees a slot does not ring. NO_CHAIN: who has put does
 * not ring for the next. PASS_ON: who could not put rings for the next all the same. Each must fail.
 */
#ifndef PRODUCERS
#define PRODUCERS 3
#endif
#ifndef SLOTS
#define SLOTS 1
#endif
#define RINGS 6

byte unused;              /* slots that are free */
byte room;                /* in the queue */
bool locked;
bool starved;
byte sleepers;
bool waking;
byte bell;
bool asleep[PRODUCERS];
byte items;               /* in the queue */
byte put;                 /* in all */

inline ring(rings) {
  if
  :: sleepers > 0 && !waking -> waking = true; rings = true
  :: else
  fi
}

inline wake_one() {
  bell++;
  atomic {
    if
    :: asleep[0] -> asleep[0] = false
    :: asleep[1] -> asleep[1] = false
#if PRODUCERS > 2
    :: asleep[2] -> asleep[2] = false
#endif
    :: else
    fi
  }
}

inline take_slot() {
  unused--; room--; items++; put++; done = true
}

/* Puts one item. The lock is held over several steps: a slot may be freed in between. */
proctype producer(byte p) {
  byte seen, woken;
  bool rings, announced, done;
  do
  :: done -> break
  :: else ->
     rings = false;
     atomic {
       !locked -> locked = true;
       waking = false;
       if :: announced -> sleepers--; announced = false :: else fi
     }
     if
     :: atomic { room > 0 && unused > 0 -> take_slot() }
     :: room > 0 && unused == 0 ->
        starved = true;                              /* a slot may be freed just before */
#ifndef NO_LOOK
        if
        :: atomic { unused > 0 -> take_slot() }
        :: unused == 0
        fi
#endif
     :: room == 0
     fi;
     atomic {
       if
       :: done ->
#ifndef NO_CHAIN
          if :: room > 0 -> ring(rings) :: else fi
#endif
       :: else ->
#ifdef PASS_ON
          if :: room > 0 -> ring(rings) :: else fi;
#endif
          seen = bell; sleepers++; announced = true
       fi;
       locked = false
     }
     if :: rings -> wake_one() :: else fi;
     if
     :: done
     :: else ->
        atomic {
          if
          :: bell == seen -> asleep[p] = true
          :: bell != seen
          fi
        }
#ifdef SPIN
end:    !asleep[p];
        woken++;
        assert(woken < RINGS)
#else
        !asleep[p]
#endif
     fi
  od
}

/* Takes each item, and is done with it some time later: it begins with some that were taken before.
 * With NO_TAKE nobody takes what is put. */
proctype consumer(byte holds) {
  bool rings, frees;
  do
#ifdef NO_TAKE
  :: put == PRODUCERS && holds == 0 -> break
#else
  :: put == PRODUCERS && items == 0 && holds == 0 -> break
  :: items > 0 ->
     rings = false;
     atomic { !locked -> items--; room++; holds++; ring(rings) }
     if :: rings -> wake_one() :: else fi
#endif
  :: holds > 0 ->
     unused++;                                       /* finish(): without the lock */
     holds--;
     frees = starved;
     if
     :: frees ->
        rings = false;
#ifndef NO_RING
        atomic { !locked -> starved = false; ring(rings) }
        if :: rings -> wake_one() :: else fi
#endif
     :: else
     fi
  od
}

#ifdef SPIN
/* Nobody frees a slot, and one of those that sleep looks again by itself (kLongestSleep). */
proctype turn() {
  atomic { asleep[0] -> asleep[0] = false }
}
#endif

init {
  atomic {
    byte i = 0;
    room = 2;
    do :: i < PRODUCERS -> run producer(i); i++ :: else -> break od;
#ifdef SPIN
    run turn()
#else
    run consumer(SLOTS)
#endif
  }
}
