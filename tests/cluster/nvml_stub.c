/* A driver library with the entry points of libnvidia-ml.so.1 that rung uses, for machines without a GPU.
   RUNG_TEST_NVML chooses the machine: two, mixed, mig, lost, old, hang, crash, absent. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, NO_DRIVER = 9, NO_FUNCTION = 13, LOST = 15 };
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long handle; /* 1 + index of a GPU; 100 + index of a MIG instance */
typedef struct { char legacy[16]; u32 domain, bus, device, id, subsystem; char bus_id[32]; } pci_info;
typedef struct { u64 total, free, used; } memory_info;
typedef struct { u32 pid; u64 used; u32 gpu_instance, compute_instance; } process_info;

static int is(const char *name) { const char *set = getenv("RUNG_TEST_NVML"); return set && !strcmp(set, name); }

int nvmlInitWithFlags(u32 flags) {
    if (is("hang")) for (;;) sleep(1000);
    if (is("crash")) abort();
    return is("absent") ? NO_DRIVER : OK;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12040; return OK; }
int nvmlSystemGetDriverVersion(char *text, u32 size) { snprintf(text, size, "550.54.15"); return OK; }
int nvmlDeviceGetCount_v2(u32 *count) { *count = 2; return OK; }
int nvmlDeviceGetHandleByIndex_v2(u32 index, handle *out) {
    if (is("lost") && index == 1) return LOST;
    *out = index + 1;
    return OK;
}
int nvmlDeviceGetUUID(handle h, char *text, u32 size) {
    if (h >= 100) snprintf(text, size, "MIG-%ld0000000-1111-2222-3333-444444444444", h - 99);
    else snprintf(text, size, "GPU-%c0000000-1111-2222-3333-444444444444", (char)('a' + h - 1));
    return OK;
}
int nvmlDeviceGetName(handle h, char *text, u32 size) {
    const char *name = h >= 100 ? "NVIDIA A100 MIG 3g.20gb" : is("mixed") && h == 1 ? "Tesla V100" : "NVIDIA A100-SXM4-40GB";
    snprintf(text, size, "%s", name);
    return OK;
}
int nvmlDeviceGetMemoryInfo(handle h, memory_info *out) {
    out->total = h >= 100 ? 20ULL << 30 : 40ULL << 30;
    out->used = h == 2 ? 10ULL << 30 : 0;
    out->free = out->total - out->used;
    return OK;
}
int nvmlDeviceGetCudaComputeCapability(handle h, int *major, int *minor) {
    *major = is("mixed") && h == 1 ? 7 : 8;
    *minor = 0;
    return OK;
}
int nvmlDeviceGetMigMode(handle h, u32 *now, u32 *pending) {
    if (is("mixed")) return NOT_SUPPORTED;
    *now = *pending = is("mig") && h == 1;
    return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(handle h, u32 *count) { *count = 7; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(handle h, u32 index, handle *out) {
    if (index > 1) return NOT_FOUND;
    *out = 100 + index;
    return OK;
}
int nvmlDeviceGetGpuInstanceId(handle h, u32 *id) { *id = (u32)(h - 99); return OK; }
int nvmlDeviceGetComputeInstanceId(handle h, u32 *id) { *id = 0; return OK; }
int nvmlDeviceGetPciInfo_v3(handle h, pci_info *out) {
    memset(out, 0, sizeof *out);
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02lX:00.0", h << 4);
    return OK;
}
static int processes(handle h, u32 *count, process_info *out) {
    if (h != 2) { *count = 0; return OK; }
    if (*count < 1) { *count = 1; return TOO_SMALL; }
    *count = 1;
    const char *pid = getenv("RUNG_TEST_PID");
    out[0].pid = pid ? (u32)atoi(pid) : 4242;
    out[0].used = 10ULL << 30;
    return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(handle h, u32 *count, process_info *out) {
    return is("old") ? NO_FUNCTION : processes(h, count, out);
}
int nvmlDeviceGetComputeRunningProcesses_v2(handle h, u32 *count, process_info *out) { return processes(h, count, out); }
int nvmlDeviceGetNvLinkState(handle h, u32 link, u32 *active) {
    if (!is("two")) return NOT_SUPPORTED;
    if (link >= 12) return INVALID_ARGUMENT;
    *active = link != 3; /* one of twelve is down */
    return OK;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(handle h, u32 link, u32 *type) { *type = link < 8 ? 0 : 2; return OK; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(handle h, u32 link, pci_info *out) { return nvmlDeviceGetPciInfo_v3(3 - h, out); }
int nvmlDeviceGetTopologyCommonAncestor(handle a, handle b, u32 *level) { *level = 30; return OK; }
int nvmlDeviceGetTotalEccErrors(handle h, u32 kind, u32 counter, u64 *count) { *count = h == 2 ? 3 : 0; return OK; }
int nvmlDeviceGetRemappedRows(handle h, u32 *corrected, u32 *uncorrected, u32 *pending, u32 *failed) {
    *corrected = 0;
    *uncorrected = *pending = h == 2;
    *failed = 0;
    return OK;
}
int nvmlDeviceGetRetiredPagesPendingStatus(handle h, u32 *pending) { return NOT_SUPPORTED; }
int nvmlDeviceGetCurrentClocksThrottleReasons(handle h, u64 *reasons) { *reasons = h == 2 ? 0x41 : 0x1; return OK; }
int nvmlDeviceGetClockInfo(handle h, u32 type, u32 *mhz) { *mhz = 210; return OK; }
int nvmlDeviceGetMaxClockInfo(handle h, u32 type, u32 *mhz) { *mhz = 1410; return OK; }
int nvmlDeviceGetTemperature(handle h, u32 sensor, u32 *celsius) { *celsius = h == 2 ? 91 : 40; return OK; }
int nvmlDeviceGetCurrPcieLinkWidth(handle h, u32 *width) { *width = h == 2 ? 4 : 16; return OK; }
int nvmlDeviceGetMaxPcieLinkWidth(handle h, u32 *width) { *width = 16; return OK; }
int nvmlDeviceGetComputeMode(handle h, u32 *mode) { *mode = 0; return OK; }
