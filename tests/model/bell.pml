/* Announce, look again, sleep: src/os/wait.h. One changer, which makes a condition true and rings; sleepers,
 * which sleep until it is.
 *
 * Checked: no wake-up is lost: a sleeper that sleeps for ever is an invalid end state.
 *
 * Memory: the change and the announcements go through store buffers, drained at a fence or at any time.
 *
 * Mutations that must fail: NO_F1, NO_F2: without the changer's or the sleeper's fence (the announcement is
 * then a plain store); NO_LOOK: no second look; NO_COUNT: the ring does not change the word.
 */
#ifndef SLEEPERS
#define SLEEPERS 2
#endif

bool condition, condition_buffered;
byte sleepers;
bool announced[SLEEPERS];  /* on its way to `sleepers` */
byte value;
bool asleep[SLEEPERS];

inline drain_changer() { d_step { if :: condition_buffered -> condition = true; condition_buffered = false :: else fi } }
inline drain_sleeper(s) { d_step { if :: announced[s] -> sleepers++; announced[s] = false :: else fi } }

active proctype changer() {
  byte i = 0;
  condition_buffered = true;  /* C */
#ifndef NO_F1
  drain_changer();            /* F1 */
#endif
  if
  :: sleepers != 0 ->         /* S */
#ifndef NO_COUNT
     value++;                 /* R */
#endif
     d_step { do :: i < SLEEPERS -> asleep[i] = false; i++ :: else -> break od }
  :: else
  fi
}

active proctype hardware() {
end: do
  :: condition_buffered -> drain_changer()
  :: announced[0] -> drain_sleeper(0)
#if SLEEPERS > 1
  :: announced[1] -> drain_sleeper(1)
#endif
  od
}

proctype sleeper(byte s) {
  byte seen;
  do
  :: condition -> break
  :: !condition ->
     announced[s] = true;     /* A */
#ifndef NO_F2
     drain_sleeper(s);        /* F2 */
#endif
     seen = value;            /* V */
#ifndef NO_LOOK
     if
     :: condition             /* L */
     :: else ->
#else
     if
     :: true ->
#endif
        d_step { if :: value == seen -> asleep[s] = true :: else fi }  /* Z */
        !asleep[s]
     fi;
     drain_sleeper(s);
     sleepers--
  od
}

init {
  byte i = 0;
  atomic { do :: i < SLEEPERS -> run sleeper(i); i++ :: else -> break od }
}
