/* References between workers: src/rref/machine*.cpp. Worker A creates a value at its owner O and passes its reference
 * to C in a call; with -DEARLY O passes one to C, too. Calls are lost or come late, in any order; their callers give
 * up at any time. With -DCRASH one of A and C may crash at any time, and the others hear of it at any time later. C
 * asks for the value once, at any time while it refers to it. Everybody drops its reference at some time.
 *
 * Records between two workers are what src/rref/link.cpp makes of letters: each is taken once, in order, at any time.
 *
 * Checked: the value is not freed while C refers to it, unless A crashed before O knew of C. When nothing can happen
 * any more, the value is gone, O has no forks, nobody waits: for a confirmation, an answer, or the end of a passage.
 *
 * Mutations, each of which must fail (tools/verify), by the hole of PyTorch's protocol that they open (docs/reference/rref.md):
 * NO_DEDUPE (H1): a question may be taken again. NO_TOMBSTONE (H2): a creation is begun although its creator has
 * given up. NO_DELETED (H3): who asks for a value that was deleted waits. STAYS_PENDING (H4): a creation that fails
 * stays under way. NO_CLOSE (H5): what became of a reference in a call that was given up is not asked. NO_LOST (H6):
 * forks of a lost worker stay. NO_INCARNATION (H7): ids of a worker that was restarted are those of before.
 * NO_RETRY (H8): what is lost once is not sent again. NO_PIN: a sender does not keep its reference for the receiver's.
 * EARLY_ACCEPT: the receiver accepts before the owner knows. DELETE_FIRST: a deletion overtakes the question before it.
 */
#define NONE 0
#define LIVE 1
#define FREED 2
/* References of A and C. */
#define CREATING 1
#define REQUESTED 2
#define CONFIRMED 3
#define DEAD 4
#define GONE 5
/* Calls and passages on the net. */
#define UNSENT 0
#define FLIES 1
#define TAKEN 2
#define VOID 3
/* Records. */
#define ABANDON 1
#define DELETE_A 2
#define REQUEST 3
#define DELETE_C 4
#define DELETE_E 5
#define CONFIRM 6
#define KILL 7
#define CLOSE 8
#define CLOSE_E 9
#define ACCEPT 10
#define REFUSE 11
#define ACCEPT_E 12
#define REFUSE_E 13

/* The owner. */
byte value = NONE;
bool seen;      /* the creation has come, or will not be taken any more */
bool o_handle;  /* O itself refers to it */
bool fork_a, fork_c, fork_e;
bool waits_c;   /* C's question waits for the creation */
bool o_lost_a, o_lost_c;
byte fetch;     /* 1: on its way to O, 2: waits there, 3: answered */
byte early;     /* O's passage to C */
bool early_open;

/* A. */
byte a = CREATING;
bool a_handle = true, a_pin_call = true, a_pin_passage, a_registered = true;
bool a_lives = true, a_lost_c;
byte call = FLIES, reply;
byte passage;
bool passage_closed;

/* C. */
byte c = NONE;
byte c_fork;    /* REQUEST or DELETE_E: which of its forks it has */
bool c_handle, c_lives = true, c_lost_a;
bool c_seen, c_seen_e, c_asked, c_unsettled;

/* Links: what was put, what was taken. */
byte ao[4], co[8], oc[6], ac[2], ca[3];
byte ao_put, ao_taken, co_put, co_taken, oc_put, oc_taken, ac_put, ac_taken, ca_put, ca_taken;
#ifdef NO_RETRY
bool ao_stuck, co_stuck, oc_stuck, ac_stuck, ca_stuck;
#define MAY(link) (!link##_stuck && link##_taken < link##_put)
#else
#define MAY(link) (link##_taken < link##_put)
#endif
#define PUT(link, record) link[link##_put] = record; link##_put++

bool crash_a, crash_c;  /* chosen at the beginning */
bool again, restarted;

inline free_if_unused() {
  if
  :: value == LIVE && !o_handle && !fork_a && !fork_c && !fork_e ->
    value = FREED;
    assert(!(c_lives && !o_lost_c && c == CONFIRMED));
    /* Without a crash, C's reference never dies. */
    assert(!(c == REQUESTED && !crash_a && !crash_c))
  :: else
  fi
}

inline answer_waiting(record) {
  if
  :: waits_c -> waits_c = false; PUT(oc, record)
  :: else
  fi;
  if
  :: fetch == 2 -> fetch = 3
  :: else
  fi
}

inline release_a() {
  if
  :: !a_pin_call && !a_pin_passage && a_registered && (a == DEAD || !a_handle) ->
    a_registered = false;
    a = GONE;
    PUT(ao, DELETE_A)
  :: else
  fi
}

inline settle_c() {
  if
  :: c_unsettled -> c_unsettled = false;
    if
    :: c_asked -> c_asked = false; PUT(ca, ACCEPT)
    :: else
    fi
  :: else
  fi
}

inline take_passage() {
  c_seen = true;
  passage = TAKEN;
  if
  :: c == CONFIRMED || c == REQUESTED -> c_handle = true; c_unsettled = (c == REQUESTED)
  :: else ->
    c = REQUESTED; c_fork = REQUEST; c_handle = true; c_unsettled = true;
#ifdef DELETE_FIRST
    skip
#else
    PUT(co, REQUEST)
#endif
  fi
}

inline take_early() {
  c_seen_e = true;
  early = TAKEN;
  if
  :: c == CONFIRMED || c == REQUESTED -> PUT(co, DELETE_E)
  :: else -> c = CONFIRMED; c_fork = DELETE_E; c_handle = true
  fi
}

inline hear_ao(record) {
  if
  :: record == ABANDON ->
    if
    :: !seen ->
#ifndef NO_TOMBSTONE
      seen = true;
#endif
      answer_waiting(KILL)
    :: else
    fi
  :: record == DELETE_A -> fork_a = false; free_if_unused()
  fi
}

inline hear_co(record) {
  if
  :: record == REQUEST ->
    if
    :: value == LIVE -> fork_c = true; PUT(oc, CONFIRM)
    :: value != LIVE && !seen -> waits_c = true
    :: else -> PUT(oc, KILL)
    fi
  :: record == DELETE_C -> fork_c = false; waits_c = false; free_if_unused()
  :: record == DELETE_E || record == REFUSE_E -> fork_e = false; free_if_unused()
  :: record == ACCEPT_E
  fi
}

active proctype world() {
  if
  :: crash_a = false
#ifdef CRASH
  :: crash_a = true
  :: crash_c = true
#endif
  fi;
do
  /* --- the call that creates --- */
  :: atomic { call == FLIES && !o_lost_a ->
    if
    :: !seen -> seen = true; call = TAKEN; value = LIVE; fork_a = true; o_handle = true; reply = FLIES;
      if
      :: waits_c -> fork_c = true
      :: else
      fi;
      answer_waiting(CONFIRM)
    :: else -> call = VOID
    fi }
  :: atomic { call == FLIES -> call = VOID }  /* lost */
  :: atomic { reply == FLIES -> reply = VOID }
  :: atomic { reply == FLIES && a_lives && a_pin_call ->
    reply = TAKEN; a_pin_call = false;
    if
    :: a == CREATING -> a = CONFIRMED
    :: else
    fi;
    release_a() }
  /* A gives up. It may have an answer on its way, or its call may come later. */
  :: atomic { a_lives && a_pin_call ->
#ifndef STAYS_PENDING
    a_pin_call = false;
    PUT(ao, ABANDON);
    a = DEAD;
    release_a()
#else
    call = VOID; reply = VOID;
    break
#endif
    }
  :: atomic { value == LIVE && o_handle -> o_handle = false; free_if_unused() }

  /* --- A passes its reference to C --- */
  :: atomic { a_lives && !a_lost_c && passage == UNSENT && a_handle && (a == CREATING || a == CONFIRMED) ->
    passage = FLIES;
#ifndef NO_PIN
    a_pin_passage = true
#endif
    }
  :: atomic { passage == FLIES -> passage = VOID }
  :: atomic { passage == FLIES && c_lives && !c_lost_a ->
    if
    :: !c_seen -> take_passage()
    :: else -> passage = VOID
    fi }
  /* Its call is answered: C's function ran, so the owner knows. */
  :: atomic { a_lives && a_pin_passage && !passage_closed && passage == TAKEN && c_lives && !c_unsettled ->
    a_pin_passage = false; release_a() }
  /* Or A gives up. */
  :: atomic { a_lives && a_pin_passage && !passage_closed && !a_lost_c ->
    passage_closed = true;
#ifndef NO_CLOSE
    PUT(ac, CLOSE)
#endif
    }
  :: atomic { a_lives && a_handle -> a_handle = false; release_a() }

#ifdef EARLY
  /* --- O passes one to C --- */
  :: atomic { value == LIVE && o_handle && early == UNSENT && !o_lost_c ->
    early = FLIES; early_open = true; fork_e = true }
  :: atomic { early == FLIES -> early = VOID }
  :: atomic { early == FLIES && c_lives ->
    if
    :: !c_seen_e -> take_early()
    :: else -> early = VOID
    fi }
  :: atomic { early_open && early == TAKEN -> early_open = false }
  :: atomic { early_open && !o_lost_c && early != UNSENT ->
    early_open = false;
#ifndef NO_CLOSE
    PUT(oc, CLOSE_E)
#endif
    }
#endif

  /* --- C --- */
  :: atomic { c_lives && c_handle && (c == REQUESTED || c == CONFIRMED || c == DEAD) ->
    c_handle = false;
    if
    :: c != DEAD ->
      if
      :: c_fork == REQUEST -> PUT(co, DELETE_C)
      :: else -> PUT(co, DELETE_E)
      fi;
#ifdef DELETE_FIRST
      if
      :: c == REQUESTED -> PUT(co, REQUEST)
      :: else
      fi;
#endif
      settle_c()
    :: else
    fi;
    c = GONE }
  :: atomic { c_lives && fetch == 0 && (c == REQUESTED || c == CONFIRMED) -> fetch = 1 }
  :: atomic { fetch == 1 ->
    if
    :: value == NONE && !seen && !o_lost_a -> fetch = 2
#ifdef NO_DELETED
    :: value == FREED -> fetch = 2
    :: else -> fetch = 3
#else
    :: else -> fetch = 3
#endif
    fi }

  /* --- links --- */
  :: atomic { MAY(ao) && !o_lost_a -> ao_taken++; hear_ao(ao[ao_taken - 1]) }
  :: atomic { MAY(co) && !o_lost_c -> co_taken++; hear_co(co[co_taken - 1]) }
#ifdef NO_DEDUPE
  :: atomic { !again && co_taken > 0 && co[0] == REQUEST && !o_lost_c -> again = true; hear_co(REQUEST) }
#endif
  :: atomic { MAY(oc) && c_lives -> oc_taken++;
    if
    :: oc[oc_taken - 1] == CONFIRM && c == REQUESTED -> c = CONFIRMED; settle_c()
    :: oc[oc_taken - 1] == KILL && c == REQUESTED ->
      assert(crash_a || crash_c || value == NONE);
      c = DEAD; settle_c()
    :: oc[oc_taken - 1] == CLOSE_E ->
      if
      :: c_seen_e -> PUT(co, ACCEPT_E)
      :: else -> c_seen_e = true; PUT(co, REFUSE_E)
      fi
    :: else
    fi }
  :: atomic { MAY(ac) && c_lives && !c_lost_a -> ac_taken++;
    if
    :: !c_seen -> c_seen = true; PUT(ca, REFUSE)
#ifdef EARLY_ACCEPT
    :: else -> PUT(ca, ACCEPT)
#else
    :: c_seen && c_unsettled -> c_asked = true
    :: else -> PUT(ca, ACCEPT)
#endif
    fi }
  :: atomic { MAY(ca) && a_lives && !a_lost_c -> ca_taken++; a_pin_passage = false; release_a() }

  /* --- crashes --- */
#ifdef CRASH
  :: atomic { crash_a && a_lives -> a_lives = false }
  :: atomic { !a_lives && !o_lost_a ->
    o_lost_a = true;
#ifndef NO_LOST
    fork_a = false;
    if
    :: !seen -> seen = true; answer_waiting(KILL)
    :: else
    fi;
    free_if_unused()
#endif
    }
  :: atomic { !a_lives && c_lives && !c_lost_a -> c_lost_a = true }
  :: atomic { crash_c && c_lives -> c_lives = false }
  :: atomic { !c_lives && !o_lost_c ->
    o_lost_c = true; waits_c = false; early_open = false;
#ifndef NO_LOST
    fork_c = false; fork_e = false;
    free_if_unused()
#endif
    }
  :: atomic { !c_lives && a_lives && !a_lost_c ->
    a_lost_c = true;
    a_pin_passage = false; release_a() }
  /* A comes back, and creates its first value. */
  :: atomic { o_lost_a && !restarted -> restarted = true;
#ifdef NO_INCARNATION
    assert(!seen && value != LIVE)
#endif
    }
#endif
#ifdef NO_RETRY
  :: atomic { ao_taken < ao_put && !ao_stuck -> ao_stuck = true }
  :: atomic { co_taken < co_put && !co_stuck -> co_stuck = true }
  :: atomic { oc_taken < oc_put && !oc_stuck -> oc_stuck = true }
  :: atomic { ac_taken < ac_put && !ac_stuck -> ac_stuck = true }
  :: atomic { ca_taken < ca_put && !ca_stuck -> ca_stuck = true }
#endif
  :: timeout -> break
od;
  /* Nothing can happen any more. */
  assert(value != LIVE);
  assert(!fork_a && !fork_c && !fork_e && !waits_c);
  assert(fetch != 2);
  assert(!c_lives || c != REQUESTED);
  assert(!a_lives || (!a_pin_call && !a_pin_passage));
}
