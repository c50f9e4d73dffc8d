// ---------------------------------------------------------------- addresses of shared memory, as PTX takes them
DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }
