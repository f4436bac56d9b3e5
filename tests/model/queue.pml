/* How consumers of a queue sleep and are woken: src/share/queue_memory.cpp (wait_and, Lock::ring,
 * place, take, repair, bury). Producers that wait for room do the same with the signs exchanged.
 *
 * Checked: no consumer sleeps for ever while an item is there (an invalid end state), whatever the
 * order of events, and with DEATH also if a consumer is killed anywhere but in the lock, which the
 * kernel passes on: asleep, woken and not yet there, or with an item in its hands.
 *
 * Each part under the lock is one step: the lock orders them. What goes on without it is the futex:
 * the value of the bell is looked at once more when going to sleep (futex_wait), and the ring comes
 * some time after the lock was given back (ring_anyway). TURNS lets sleepers look again by themselves
 * when nothing else happens, as kLongestSleep does; without it a consumer that was woken and killed
 * takes the ring with it. NO_CHAIN: who was woken does not ring for the next one. NO_BELL: who goes
 * to sleep does not look at the bell again. Each of these must fail.
 */
#ifndef CONSUMERS
#define CONSUMERS 3
#endif
#ifndef PRODUCERS
#define PRODUCERS 2
#endif
#ifndef ITEMS
#define ITEMS 2            /* of each producer */
#endif

byte count;               /* items that wait */
byte sleepers;
bool waking;              /* one was woken and has not come yet */
byte bell;                /* the futex word, modulo 256 */
bool asleep[CONSUMERS];   /* in futex_wait */
bool dead[CONSUMERS];
byte taken;               /* in all */

/* Lock::ring, under the lock. */
inline ring(rings) {
  if
  :: sleepers > 0 && !waking -> waking = true; rings = true
  :: else
  fi
}

/* ring_anyway(1), without the lock: any one of those that sleep. A killed one is not in the list any more. */
inline wake_one() {
  bell++;
  atomic {
    if
    :: asleep[0] -> asleep[0] = false
    :: asleep[1] -> asleep[1] = false
#if CONSUMERS > 2
    :: asleep[2] -> asleep[2] = false
#endif
    :: else
    fi
  }
}

proctype producer() {
  byte left = ITEMS;
  bool rings;
  do
  :: left > 0 ->
     rings = false;
     atomic { count++; ring(rings) }
     if :: rings -> wake_one() :: else fi;
     left--
  :: else -> break
  od
}

/* Consumers together take all items: each goes on until that is done. With ONCE each takes one, and is
 * busy with it for ever: the others have to be woken without it. */
proctype consumer(byte c) {
  byte seen;
  bool rings, announced, got;
  announced = false;
  do
  :: taken == PRODUCERS * ITEMS -> break
  :: else ->
     rings = false;
     got = false;
     atomic {
       if :: dead[c] -> goto stop :: else fi;
       waking = false;
       if :: announced -> sleepers--; announced = false :: else fi;
       if
       :: count > 0 ->
          count--; taken++; got = true;
#ifndef NO_CHAIN
          if :: count > 0 -> ring(rings) :: else fi
#endif
       :: else -> seen = bell; sleepers++; announced = true
       fi
     }
     if :: rings -> wake_one() :: else fi;
     if
#ifdef ONCE
     :: got -> break
#else
     :: got
#endif
     :: else ->
        atomic {
          if
          :: dead[c] -> goto stop
#ifdef NO_BELL
          :: !dead[c] -> asleep[c] = true
#else
          :: !dead[c] && bell == seen -> asleep[c] = true
          :: !dead[c] && bell != seen
#endif
          fi
        }
        if
        :: !asleep[c]
        :: taken == PRODUCERS * ITEMS -> asleep[c] = false; break   /* all is done: close() rings */
#ifdef TURNS
        :: timeout -> asleep[c] = false
#endif
        fi
     fi
  od;
stop:
  /* Its announcement goes when its process is found to be dead (bury). */
  asleep[c] = false
}

#ifdef DEATH
/* Consumer 0 is killed at any moment; a ring that it has got is lost. */
active proctype killer() {
  atomic { dead[0] = true; asleep[0] = false }
}
#endif

init {
  atomic {
    byte i = 0;
    do :: i < CONSUMERS -> run consumer(i); i++ :: else -> break od;
    i = 0;
    do :: i < PRODUCERS -> run producer(); i++ :: else -> break od
  }
}
