// What is really left of this machine: memory of this process's control group and of the machine, cores.
#pragma once

#include <cstdint>

namespace oomb {

/// Bytes this process may still take from host memory: the smallest of MemAvailable and, for each control group up to
/// the root, its limit minus its use. -1 if nothing can be read.
int64_t available_host_bytes();

/// Peak resident size of this process (VmHWM), 0 if unknown.
int64_t peak_host_bytes();
/// Lets peak_host_bytes() count from now on. False where the kernel does not allow it.
bool reset_peak_host_bytes();

/// Cores this process may run on.
int64_t available_cores();

}  // namespace oomb
