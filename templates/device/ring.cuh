// ---------------------------------------------------------------- rings of shared-memory stages
// The two barriers of each stage.  The phases of both begin at 0; a producer waits for the phase before, so that its
// first round passes.
template <int STAGES> struct Pipe { u64 full[STAGES], empty[STAGES]; };

// A position in a ring: the parity flips each time it has gone round.
template <int STAGES> struct Ring {
  int stage = 0;
  u32 parity = 0;
  DEVICE void advance() {
    if (++stage == STAGES) { stage = 0; parity ^= 1; }
  }
};

template <int STAGES> DEVICE void init(Pipe<STAGES>& pipe, int consumers) {
  for (int stage = 0; stage < STAGES; stage++) {
    mbarrier_init(pipe.full[stage], 1);
    mbarrier_init(pipe.empty[stage], consumers);
  }
}

template <int STAGES> DEVICE void await_full(Pipe<STAGES>& pipe, const Ring<STAGES>& at) {
  mbarrier_wait(pipe.full[at.stage], at.parity);
}

template <int STAGES> DEVICE void await_empty(Pipe<STAGES>& pipe, const Ring<STAGES>& at) {
  mbarrier_wait(pipe.empty[at.stage], at.parity ^ 1);
}

// One arrival a warp.
template <int STAGES> DEVICE void release(Pipe<STAGES>& pipe, const Ring<STAGES>& at) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(pipe.empty[at.stage]);
}
