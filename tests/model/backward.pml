/* A backward pass across three workers: src/autograd (walk.cpp, pass.cpp, coordinator.cpp). Worker 0 is its root.
 *
 * Pairs are messages of the forward pass: gradients go from where pair p arrived to who sent it.
 *   p   arrived at   sent by   its gradient needs            leads to
 *   0       0           1      the loss                       1, 2
 *   1       1           2      that of 0                      3
 *   2       1           0      that of 0                      4     (a cycle: 0 -> 1 -> 0)
 *   3       2           1      that of 1
 *   4       0           2      the loss, and that of 2
 *   5       2           1      nothing: its result was not used
 *
 * What was sent stays sent: it may be taken at any time, again as often as DUPS allows, and never, until nothing
 * else can happen (that is what retrying comes to). Nothing is in order.
 *
 * With -DLINEAGE messages have said what they depend on: nobody is asked. (2 needs the gradient of 3, too, then: worker 2
 * must run before the root sends it anything.) The root tells each worker its part, with
 * the first gradient that it sends there itself, or when it waits; gradients that come before that are held.
 *
 * With -DFAIL a node may fail on any worker, with -DDEADLINE the root's time may be over, with -DCRASH worker 1 or 2
 * may crash, each at any time before the root has decided.
 *
 * Checked: nobody runs before discovery is over, and then exactly what the loss depends on, each once. Gradients
 * count on all workers or on none. At the end nobody waits, and nobody has anything left of the pass; without
 * failures it went well.
 *
 * Mutations, each of which must fail (tools/verify): START_EARLY: the root runs when it has asked, not when it has been
 * answered. NO_CACHE: a question that comes again is answered with what is new then. NO_DEDUPE: a gradient that
 * comes twice passes two gates. GATE_ORDER: gates wait for their gradients in a fixed order. ALL_SENDS: sends that
 * nobody asks for are waited for, too (FAST). COMMIT_AT_DONE: a worker's gradients count when it is done.
 * NO_TOMBSTONE: what comes after the end of a pass begins it again. NO_ABORT: only the root stops. With LINEAGE:
 * NO_HOLD: a gradient that comes before a worker's part starts it. NO_FLUSH: the root does not tell parts when it waits.
 * PLAN_AGAIN: a part that comes again begins the pass again. WRONG_LINEAGE: a message did not say all, and nobody counts.
 */
#define N 3
#ifndef DUPS
#define DUPS 2
#endif
#define BIT(p) (1 << (p))
#define HAS(set, p) (((set) >> (p)) & 1)

/* By pair. */
#define SENDER(p) (p == 2 -> 0 : (p == 1 || p == 4 -> 2 : 1))
#define NEXT(p) (p == 0 -> 6 : (p == 1 -> 8 : (p == 2 -> 16 : 0)))

/* The root. Sets of pairs, or of workers, as bits. */
byte asked, answered, reached;
bool discovered, heard_fail, decided_commit, decided_abort;
byte heard_done;

/* The workers. */
byte awaited[N];    /* sends that gradients will come for */
byte w_reached[N];  /* of what arrived */
byte answer[6];     /* to the question about a pair */
byte questions;     /* that were taken */
byte fired;         /* gradients that were sent */
byte came;          /* those that were taken */
byte inbox[6];
byte passed;        /* gates */
bool running[N], done[N], committed[N], ended[N], stopped[N], crashed[N];
byte plan_gone, plan_came;  /* parts, by worker */
byte rides;                 /* gradients that have a part with them */
byte dups = DUPS;
bool may_fail = true, may_crash = true;

#define WORKERS ((HAS(asked, 0) || HAS(asked, 3) -> 2 : 0) | (HAS(asked, 1) || HAS(asked, 4) -> 4 : 0))
#define OPEN(w) (!ended[w] && !stopped[w] && !crashed[w])
#define DECIDED (decided_commit || decided_abort)

/* What a pair's gradient is made of has run. */
#ifdef LINEAGE
#define READY2 (HAS(passed, 0) && HAS(passed, 3))
#else
#define READY2 HAS(passed, 0)
#endif
#define READY(p) (p == 0 -> running[0] : (p == 1 -> HAS(passed, 0) : (p == 2 -> READY2 : (p == 3 -> HAS(passed, 1) : running[0] && HAS(passed, 2)))))

/* w has sent p: what is new that it leads to. */
inline expand(w, p) {
  awaited[w] = awaited[w] | BIT(p);
#ifdef ALL_SENDS
  if
  :: w == 1 -> awaited[1] = awaited[1] | BIT(5)
  :: else
  fi;
#endif
#ifdef NO_CACHE
  answer[p] = NEXT(p) & ~w_reached[w];
#else
  if
  :: !HAS(questions, p) -> answer[p] = NEXT(p) & ~w_reached[w]
  :: else
  fi;
#endif
  questions = questions | BIT(p);
  w_reached[w] = w_reached[w] | NEXT(p)
}

inline ask(p) {
  asked = asked | BIT(p);
  if
  :: SENDER(p) == 0 -> expand(0, p); answered = answered | BIT(p); reached = reached | answer[p]
  :: else
  fi
}

inline take_question(w, p) {
  if
  :: HAS(questions, p) -> dups--
  :: else
  fi;
  if
  :: ended[w] ->
#ifdef NO_TOMBSTONE
     ended[w] = false; running[w] = false; done[w] = false; stopped[w] = false; expand(w, p)
#else
     questions = questions | BIT(p)
#endif
  :: !ended[w] && !running[w] && !done[w] && !stopped[w] -> expand(w, p)
  :: else  /* an old one */
  fi
}

/* All that w has sent and got, of what the loss depends on. */
inline know_plan(w) {
  if
  :: w == 1 ->
#ifdef WRONG_LINEAGE
     awaited[1] = BIT(0);
#else
     awaited[1] = BIT(0) | BIT(3);
#endif
     w_reached[1] = BIT(1) | BIT(2)
  :: w == 2 -> awaited[2] = BIT(1) | BIT(4); w_reached[2] = BIT(3)
  fi
}

inline take_plan(w) {
  if
#ifdef PLAN_AGAIN
  :: !crashed[w] && (ended[w] || done[w]) -> ended[w] = false; done[w] = false; stopped[w] = false; running[w] = true; know_plan(w)
#endif
  :: OPEN(w) && !running[w] && !done[w] ->
     know_plan(w);
     /* What was held. */
     if
     :: (w == 1 && inbox[0] + inbox[3] > 0) || (w == 2 && inbox[1] + inbox[4] > 0) -> running[w] = true
     :: else
     fi
  :: else
  fi;
  plan_came = plan_came | BIT(w)
}

inline take_gradient(w, p) {
  if
  :: HAS(came, p) -> dups--
  :: else
  fi;
  if
  :: HAS(rides, p) -> take_plan(w)
  :: else
  fi;
  if
  :: OPEN(w) && !done[w] ->
     if
#if defined(LINEAGE) && !defined(NO_HOLD)
     :: w != 0 && !HAS(plan_came, w) -> skip  /* it waits for w's part */
#endif
     :: else ->
        assert(HAS(awaited[w], p));
        if
        :: !running[w] ->
           /* Its walk must be complete. */
           assert((reached & ~answered) == 0);
           running[w] = true
        :: else
        fi
     fi;
#ifdef NO_DEDUPE
     inbox[p]++
#else
     if
     :: !HAS(came, p) -> inbox[p]++
     :: else
     fi
#endif
  :: else  /* late */
  fi;
  came = came | BIT(p)
}

inline fire(w, p) {
  fired = fired | BIT(p);
#ifdef LINEAGE
  if
  :: w == 0 && !HAS(plan_gone, SENDER(p)) -> plan_gone = plan_gone | BIT(SENDER(p)); rides = rides | BIT(p)
  :: else
  fi
#endif
}

inline pass_gate(w, p) {
  inbox[p]--;
  assert(!HAS(passed, p));  /* each once */
  passed = passed | BIT(p)
}

#define ASK(p) atomic { !discovered && !DECIDED && HAS(reached, p) && !HAS(asked, p) -> ask(p) }
#define QUESTION(w, p) atomic { HAS(asked, p) && !crashed[w] && (!HAS(questions, p) || dups > 0) -> take_question(w, p) }
#define ANSWER(w, p) atomic { !discovered && !DECIDED && HAS(questions, p) && HAS(asked, p) && !HAS(answered, p) && OPEN(w) -> \
  answered = answered | BIT(p); reached = reached | answer[p] }
#define FIRE(w, p) atomic { running[w] && OPEN(w) && HAS(w_reached[w], p) && !HAS(fired, p) && READY(p) -> fire(w, p) }
#define GRADIENT(w, p) atomic { HAS(fired, p) && !crashed[w] && (!HAS(came, p) || dups > 0) -> take_gradient(w, p) }
#define PLAN_ALONE(w) (HAS(plan_gone, w) && !(w == 1 && HAS(rides, 0)) && !(w == 2 && HAS(rides, 4)))
#define PLAN(w) atomic { PLAN_ALONE(w) && !crashed[w] && (!HAS(plan_came, w) || dups > 0) -> \
  if :: HAS(plan_came, w) -> dups-- :: else fi; take_plan(w) }
#ifdef GATE_ORDER
/* Worker 1's first gate is for 3, which depends on 0. */
#define GATE(w, p) atomic { inbox[p] > 0 && running[w] && OPEN(w) && (p != 0 || HAS(passed, 3)) -> pass_gate(w, p) }
#else
#define GATE(w, p) atomic { inbox[p] > 0 && running[w] && OPEN(w) -> pass_gate(w, p) }
#endif
#ifdef COMMIT_AT_DONE
#define AT_DONE(w) committed[w] = true
#else
#define AT_DONE(w) skip
#endif
#define DONE(w) atomic { running[w] && OPEN(w) && (awaited[w] & ~passed) == 0 && (w_reached[w] & ~fired) == 0 -> \
  done[w] = true; running[w] = false; AT_DONE(w) }
#define HEAR(w) atomic { done[w] && !crashed[w] && !HAS(heard_done, w) && !DECIDED -> heard_done = heard_done | BIT(w) }
#define COMMIT(w) atomic { decided_commit && HAS(WORKERS, w) && !ended[w] && !crashed[w] -> \
  assert(done[w]); committed[w] = true; ended[w] = true }
#define ABORT(w) atomic { decided_abort && HAS(WORKERS, w) && !ended[w] && !crashed[w] -> ended[w] = true; running[w] = false }

active proctype World() {
  /* The root walks from the loss. */
#ifdef LINEAGE
  atomic { reached = 31; asked = 31; answered = 31; questions = 31; discovered = true; w_reached[0] = BIT(0) | BIT(4);
    awaited[0] = BIT(2); running[0] = true };
#else
  atomic { reached = BIT(0) | BIT(4); w_reached[0] = reached };
#endif
  do
  :: ASK(0) :: ASK(1) :: ASK(2) :: ASK(3) :: ASK(4)
  :: QUESTION(1, 0) :: QUESTION(2, 1) :: QUESTION(1, 3) :: QUESTION(2, 4)
  :: ANSWER(1, 0) :: ANSWER(2, 1) :: ANSWER(1, 3) :: ANSWER(2, 4)
#ifdef START_EARLY
  :: atomic { !discovered && !DECIDED && (reached & ~asked) == 0 -> discovered = true; running[0] = true }
#else
  :: atomic { !discovered && !DECIDED && (reached & ~answered) == 0 -> discovered = true; running[0] = true }
#endif
#ifdef LINEAGE
#ifndef NO_FLUSH
  /* It waits at its gate: whoever has no part yet gets it now. */
  :: atomic { running[0] && OPEN(0) && HAS(fired, 0) && inbox[2] == 0 && !HAS(passed, 2) && plan_gone != 6 -> plan_gone = 6 }
#endif
  :: PLAN(1) :: PLAN(2)
#endif
  :: FIRE(0, 0) :: FIRE(1, 1) :: FIRE(1, 2) :: FIRE(2, 3) :: FIRE(0, 4)
  :: GRADIENT(1, 0) :: GRADIENT(2, 1) :: GRADIENT(0, 2) :: GRADIENT(1, 3) :: GRADIENT(2, 4)
  :: GATE(1, 0) :: GATE(2, 1) :: GATE(0, 2) :: GATE(1, 3) :: GATE(2, 4)
  :: DONE(0) :: DONE(1) :: DONE(2)
  :: HEAR(1) :: HEAR(2)
  :: atomic { done[0] && !DECIDED && (WORKERS & ~heard_done) == 0 ->
       decided_commit = true; committed[0] = true; ended[0] = true }
  :: COMMIT(1) :: COMMIT(2)
#ifdef FAIL
  :: atomic { may_fail && !DECIDED && running[1] -> may_fail = false; stopped[1] = true; running[1] = false; heard_fail = true }
  :: atomic { may_fail && !DECIDED && running[2] -> may_fail = false; stopped[2] = true; running[2] = false; heard_fail = true }
#endif
#ifdef DEADLINE
  :: atomic { may_fail && !DECIDED -> may_fail = false; heard_fail = true }
#endif
#ifdef CRASH
  :: atomic { may_crash && !DECIDED -> may_crash = false; crashed[1] = true; running[1] = false }
  :: atomic { may_crash && !DECIDED -> may_crash = false; crashed[2] = true; running[2] = false }
  :: atomic { !DECIDED && !heard_fail && crashed[1] && HAS(WORKERS, 1) && !HAS(heard_done, 1) -> heard_fail = true }
  :: atomic { !DECIDED && !heard_fail && crashed[2] && HAS(WORKERS, 2) && !HAS(heard_done, 2) -> heard_fail = true }
#endif
  :: atomic { heard_fail && !DECIDED -> decided_abort = true; ended[0] = true; running[0] = false }
#ifndef NO_ABORT
  :: ABORT(1) :: ABORT(2)
#endif
  :: else -> break
  od;
  /* Nothing can happen any more. */
  assert(decided_commit != decided_abort);
#if !defined(FAIL) && !defined(DEADLINE) && !defined(CRASH)
  assert(decided_commit);
#endif
  assert(!HAS(WORKERS, 1) || ended[1] || crashed[1]);
  assert(!HAS(WORKERS, 2) || ended[2] || crashed[2]);
  assert(!running[0] && !running[1] && !running[2]);
  assert(committed[0] == decided_commit);
  assert(crashed[1] || committed[1] == (decided_commit && HAS(WORKERS, 1)));
  assert(crashed[2] || committed[2] == (decided_commit && HAS(WORKERS, 2)));
  assert(!decided_commit || (passed == 31 && fired == 31))
}
