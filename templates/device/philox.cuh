// ---------------------------------------------------------------- philox: random numbers by their position
// Philox-4x32-10 (Salmon, Moraes, Dror and Shaw 2011): four words for a counter of four and a key of two.
struct Words { u32 word[4]; };

DEVICE Words philox_4x32_10(Words counter, u32 key0, u32 key1) {
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const u64 first = mul_wide_u32(0xD2511F53, counter.word[0]), second = mul_wide_u32(0xCD9E8D57, counter.word[2]);
    const u32 second_high = u32(second >> 32), first_high = u32(first >> 32);
    counter = {second_high ^ counter.word[1] ^ key0, u32(second), first_high ^ counter.word[3] ^ key1, u32(first)};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}
