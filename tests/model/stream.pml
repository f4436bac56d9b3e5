/* A lent letter that goes before it is filled: src/transport/shm, ShmRemote::stream and end_stream,
 * ShmEndpoint::work_on_transfer. A sender fills one block in STEPS steps, says how many are there (`ready`), and
 * knocks at the end. Two threads of the receiver have the letter in turns: one takes it out of the queue under the lock,
 * looks and copies without it, and puts it back, or aside if looks have been in vain. Another thread of the sender
 * collects what was given back, and may find the remote lost.
 *
 * Checked: nothing is copied before it is there; the letter arrives if its sender has filled it; lost() is told, after
 * that; the block is free in the end, and not before sender and receiver are done with it; nobody is cut off
 * for what it may do.
 *
 * Memory: `ready` goes through a store buffer, drained by a fence or at any time. Who is woken, and how, is doorbell.pml's:
 * here a thread sleeps until its condition holds.
 *
 * With DEATH the sender may die at any point; with END it says goodbye when it has sent; with CUT its other thread loses
 * the remote at any point.
 *
 * Mutations that must fail: READY_FIRST: a step is said to be there before it was copied; NO_KNOCK; NO_FENCE: before the
 * knock; NO_SECOND_LOOK: a letter is put aside without a look under the lock; DROP_STALLED: a loss drops letters that are
 * put aside though they are complete; KEEP_STALLED: it drops none; NOT_LENT: memory that is given back
 * before it was filled is no loan; FREE_EARLY: it is freed at once; LOSE_FREES: a loss frees it; END_FREES: who has
 * filled it for a lost remote frees it.
 */
#ifndef STEPS
#define STEPS 2
#endif
#define VAIN 1
#define THREADS 2

mtype = { kFree, kStreaming, kLent, kLimbo, kNone, kRing, kQueue, kHand, kStalled };

/* shared memory */
byte filled, ready, buffered;
bool knocked, released;
/* the sender */
mtype loan = kFree;
bool filling, given_back, writer_gone, sent, dead, finished;
/* the connection */
bool bye, sent_before;
/* the receiver, under its lock */
mtype where = kNone;
byte done, vain;
bool hold, locked, ending, told, arrived;

inline drain() { d_step { if :: buffered != 0 -> ready = buffered; buffered = 0 :: else fi } }
inline free_block() { assert(!filling); assert(!hold); loan = kFree }
inline say_bye() { d_step { if :: !bye -> drain(); sent_before = sent; bye = true :: else fi } }
inline may_die() {
#ifdef DEATH
  if :: true :: goto died fi
#endif
  skip
}

active proctype sender() {
  byte step = 0;
  d_step { loan = kStreaming; filling = true; where = kRing; knocked = true };
  do
  :: step < STEPS ->
     may_die();
     step++;
#ifdef READY_FIRST
     buffered = step;
     drain();
#endif
     filled = step;
#ifndef READY_FIRST
     buffered = step
#endif
  :: else -> break
  od;
  may_die();
#ifndef NO_FENCE
  drain();
#endif
#ifndef NO_KNOCK
  if :: !knocked -> knocked = true :: else fi;
#endif
  may_die();
  d_step {
    filling = false;
    if
    :: !writer_gone && !given_back -> loan = kLent
    :: given_back -> free_block()
    :: else ->
#ifdef END_FREES
       free_block()
#else
       loan = kLimbo
#endif
    fi;
    sent = true
  }
#ifdef END
  say_bye();
#endif
  goto over;
#ifdef DEATH
died: skip;
  d_step { dead = true; filling = false };
  say_bye();
#endif
over:
  finished = true
}

active proctype hardware() {
end: do :: buffered != 0 -> drain() od
}

/* The sender's other thread. */
active proctype collector() {
end: do
  :: d_step { released && !writer_gone && !dead ->
       released = false;
       if
#ifdef NOT_LENT
       :: loan == kStreaming -> assert(false)
#endif
#ifdef FREE_EARLY
       :: loan == kStreaming -> free_block()
#endif
       :: loan == kStreaming && !given_back -> given_back = true
       :: loan == kLent -> free_block()
       :: else -> assert(false)  /* the other side is cut off */
       fi }
  :: d_step { released && loan == kLimbo && !dead -> released = false; free_block() }
#ifdef CUT
  :: d_step { !writer_gone && !dead && loan != kFree ->
       writer_gone = true;
       say_bye();
       if
       :: loan == kLent -> loan = kLimbo
#ifdef LOSE_FREES
       :: loan == kStreaming -> free_block()
#endif
       :: else
       fi }
#endif
  od
}

inline give_back() { hold = false; released = true; where = kNone }

inline lose() {
  ending = true;
  if
#ifndef KEEP_STALLED
#ifdef DROP_STALLED
  :: where == kStalled -> give_back()
#else
  :: where == kStalled && ready > done -> where = kQueue
  :: where == kStalled && ready <= done -> give_back()
#endif
#endif
  :: else
  fi
}

inline stall() { if :: ending -> give_back() :: else -> where = kStalled; vain = 0 fi }

#define POLLS (where == kQueue)
#define TAKES (knocked || (ending && where == kRing))
#define LOSES (bye && !ending)
#define TELLS (ending && where == kNone && !told)

proctype receiver() {
  byte seen;
end: do
  :: atomic { !locked && (POLLS || TAKES || LOSES || TELLS) -> locked = true };
     if
     :: LOSES -> d_step { lose(); locked = false }
     :: !LOSES && TAKES -> d_step {
          knocked = false;
          if
          :: where == kRing -> where = kQueue; hold = true
          :: where == kStalled && ready > done -> where = kQueue
          :: else
          fi;
          locked = false }
     :: !LOSES && !TAKES && POLLS ->
        d_step { where = kHand; locked = false };
        seen = ready;
        if
        :: seen > done -> assert(filled >= seen)
        :: else
        fi;
        atomic { !locked -> locked = true };
        d_step {
          if
          :: seen == STEPS -> done = seen; arrived = true; assert(!told); give_back()
          :: seen < STEPS && seen > done -> done = seen; vain = 0; where = kQueue
          :: else ->
             if :: vain < VAIN -> vain++ :: else fi;
             if
#ifdef NO_SECOND_LOOK
             :: vain == VAIN || ending -> stall()
#else
             :: (vain == VAIN || ending) && ready <= done -> stall()
#endif
             :: else -> where = kQueue
             fi
          fi;
          locked = false }
        seen = 0
     :: !LOSES && !TAKES && !POLLS && TELLS -> d_step { assert(!sent_before || arrived); told = true; locked = false }
     :: else -> locked = false
     fi
  od
}

init {
  atomic { run receiver(); run receiver() };
  timeout ->
  assert(finished);
  assert(arrived || bye);
  assert(told == bye);
  assert(dead || loan == kFree)
}
