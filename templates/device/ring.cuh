// ---------------------------------------------------------------- rings of shared-memory stages
// The two barriers of each stage.
template <int STAGES> struct Pipe { u64 full[STAGES], empty[STAGES]; };

// A position in a ring: how many stages were passed.  The parity flips each time it has gone round.
template <int STAGES> struct Ring {
  u32 passed = 0;
  DEVICE int stage() const { return passed % STAGES; }
  DEVICE u32 parity() const { return passed / STAGES % 2; }
};

template <int STAGES> DEVICE void init(Pipe<STAGES>& pipe, int consumers) {
  for (int stage = 0; stage < STAGES; stage++) {
    mbarrier_init(pipe.full[stage], 1);
    mbarrier_init(pipe.empty[stage], consumers);
  }
}

// The same where several warps fill a stage.
template <int STAGES> DEVICE void init_filled_by(Pipe<STAGES>& pipe, int consumers, int producers) {
  for (int stage = 0; stage < STAGES; stage++) {
    mbarrier_init(pipe.full[stage], producers);
    mbarrier_init(pipe.empty[stage], consumers);
  }
}

template <int STAGES> DEVICE void await_full(Pipe<STAGES>& pipe, const Ring<STAGES>& at) {
  mbarrier_wait(pipe.full[at.stage()], at.parity());
}

// Asked ahead of a wait, which then takes no time.
template <int STAGES> DEVICE bool is_full(Pipe<STAGES>& pipe, const Ring<STAGES>& at) {
  return mbarrier_test_wait(pipe.full[at.stage()], at.parity());
}

// The first round passes: the phase before the first counts as ended.
template <int STAGES> DEVICE void await_empty(Pipe<STAGES>& pipe, const Ring<STAGES>& at) {
  mbarrier_wait(pipe.empty[at.stage()], at.parity() ^ 1);
}

// One arrival a warp, by the lane given.
template <int STAGES> DEVICE void release(Pipe<STAGES>& pipe, const Ring<STAGES>& at, int lane = 0) {
  if (threadIdx.x % 32 == lane) mbarrier_arrive(pipe.empty[at.stage()]);
}
