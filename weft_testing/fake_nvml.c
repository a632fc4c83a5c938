/* A stand-in for NVIDIA's management library (libnvidia-ml.so.1): its figures are files in the folder FAKE_NVML_DIR.
 *
 * Every call reads them; what each file means is described in fake_nvml.py. Layouts and numbers are those of nvml.h, as
 * nvidia-ml-py 13 declares them (class c_nvml..._t, NVML_ERROR_...). Not thread-safe where the real one is: a reader
 * asks from one thread at a time.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    SUCCESS = 0,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    UNKNOWN = 999
};
enum { MAX_DEVICES = 64, MAX_HOLDERS = 1024, MAX_LINE = 512, MAX_PATH = 4096, FOREIGN_OFFSET = 5000000 };
#define NOT_AVAILABLE (~0ULL)
#define NO_PART 0xFFFFFFFFu

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; } Process;
typedef struct { unsigned pid; unsigned long long time; unsigned sm, mem, enc, dec; } Sample;
typedef struct {
    char legacy_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char id[32];
} Pci;
typedef struct { unsigned index, pid, part; unsigned long long bytes; } Holder;
typedef struct { char uuid[96]; char name[96]; unsigned long long total; } Device;

static FILE *open_file(const char *name) {
    char path[MAX_PATH];
    const char *folder = getenv("FAKE_NVML_DIR");
    if (folder == NULL) return NULL;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return fopen(path, "r");
}

static int is_there(const char *name) {
    FILE *file = open_file(name);
    if (file != NULL) fclose(file);
    return file != NULL;
}

/* What every call does first. */
static int begin(void) {
    if (is_there("no_driver")) return DRIVER_NOT_LOADED;
    return is_there("fail") ? UNKNOWN : SUCCESS;
}

/* The line of `name` with this number (from 0); 0 when there is none. */
static int read_line(const char *name, unsigned number, char line[MAX_LINE]) {
    FILE *file = open_file(name);
    int found = 0;
    if (file == NULL) return 0;
    for (unsigned at = 0; fgets(line, MAX_LINE, file) != NULL; at++)
        if (at == number) { found = 1; break; }
    fclose(file);
    line[strcspn(line, "\n")] = 0;
    return found;
}

static unsigned long long read_number(const char *name, unsigned line_number, unsigned long long otherwise) {
    char line[MAX_LINE];
    return read_line(name, line_number, line) ? strtoull(line, NULL, 10) : otherwise;
}

static int read_device(unsigned index, Device *device) {
    char line[MAX_LINE];
    if (index >= MAX_DEVICES || !read_line("devices", index, line)) return 0;
    device->name[0] = 0;
    return sscanf(line, "%95s %llu %95[^\n]", device->uuid, &device->total, device->name) >= 2;
}

static unsigned device_count(void) {
    Device device;
    unsigned count = 0;
    while (read_device(count, &device)) count++;
    return count;
}

/* Whether this process runs; with start ticks, whether it is still the same one. A zombie holds nothing. */
static int lives(unsigned pid, unsigned long long start_ticks) {
    char path[64], text[2048], state;
    unsigned long long started = 0;
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    FILE *file = fopen(path, "r");
    if (file == NULL) return 0;
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = 0;
    char *rest = strrchr(text, ')');
    if (rest == NULL) return 0;
    if (sscanf(rest + 2, "%c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &state,
               &started) != 2)
        return 0;
    return state != 'Z' && state != 'X' && (start_ticks == 0 || started == start_ticks);
}

static unsigned read_holders(Holder holders[MAX_HOLDERS]) {
    char path[MAX_PATH], name[MAX_LINE], line[MAX_LINE];
    const char *folder = getenv("FAKE_NVML_DIR");
    unsigned count = 0;
    if (folder == NULL) return 0;
    snprintf(path, sizeof path, "%s/held", folder);
    DIR *listing = opendir(path);
    if (listing == NULL) return 0;
    for (struct dirent *entry; count < MAX_HOLDERS && (entry = readdir(listing)) != NULL;) {
        Holder holder = {.part = NO_PART};
        unsigned long long start_ticks = 0;
        if (sscanf(entry->d_name, "%u.%u.%u", &holder.pid, &holder.index, &holder.part) < 2) continue;
        snprintf(name, sizeof name, "held/%s", entry->d_name);
        if (!read_line(name, 0, line) || sscanf(line, "%llu %llu", &holder.bytes, &start_ticks) < 1) continue;
        if (lives(holder.pid, start_ticks)) holders[count++] = holder;
    }
    closedir(listing);
    return count;
}

static unsigned long long held_bytes(unsigned index) {
    static Holder holders[MAX_HOLDERS];
    unsigned long long sum = 0;
    for (unsigned at = 0, count = read_holders(holders); at < count; at++)
        if (holders[at].index == index) sum += holders[at].bytes;
    return sum;
}

/* Handles are index + 1. */
static int device_of(void *handle, unsigned *index, Device *device) {
    int status = begin();
    if (status != SUCCESS) return status;
    *index = (unsigned)(size_t)handle - 1;
    return read_device(*index, device) ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return begin(); }
int nvmlInit_v2(void) { return begin(); }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int status) { return status == SUCCESS ? "Success" : "Fake NVML error"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    int status = begin();
    *count = status == SUCCESS ? device_count() : 0;
    return status;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    Device device;
    int status = begin();
    if (status != SUCCESS) return status;
    if (!read_device(index, &device)) return INVALID_ARGUMENT;
    *handle = (void *)(size_t)(index + 1);
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
    unsigned index;
    Device device;
    int status = device_of(handle, &index, &device);
    if (status == SUCCESS) snprintf(text, size, "%s", device.uuid);
    return status;
}

int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
    unsigned index;
    Device device;
    int status = device_of(handle, &index, &device);
    if (status == SUCCESS) snprintf(text, size, "%s", device.name);
    return status;
}

int nvmlDeviceGetPciInfo_v3(void *handle, Pci *pci) {
    unsigned index;
    Device device;
    int status = device_of(handle, &index, &device);
    if (status != SUCCESS) return status;
    memset(pci, 0, sizeof *pci);
    pci->bus = (unsigned)read_number("buses", index, index + 1);
    snprintf(pci->id, sizeof pci->id, "00000000:%02X:00.0", pci->bus);
    snprintf(pci->legacy_id, sizeof pci->legacy_id, "0000:%02X:00.0", pci->bus);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    unsigned index;
    Device device;
    int status = device_of(handle, &index, &device);
    if (status != SUCCESS) return status;
    if (device.total == 0) return NOT_SUPPORTED;
    unsigned long long used = held_bytes(index) + read_number("reserved_bytes", 0, 0);
    memory->total = device.total;
    memory->used = used < device.total ? used : device.total;
    memory->free = device.total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, MemoryV2 *memory) {
    Memory first;
    int status = nvmlDeviceGetMemoryInfo(handle, &first);
    if (status != SUCCESS) return status;
    memory->total = first.total;
    memory->reserved = read_number("reserved_bytes", 0, 0);
    memory->free = first.free;
    memory->used = first.used - (memory->reserved < first.used ? memory->reserved : first.used);
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *handle, Utilization *rates) {
    unsigned index;
    Device device;
    int status = device_of(handle, &index, &device);
    if (status != SUCCESS) return status;
    if (!is_there("utilization")) return NOT_SUPPORTED;
    rates->gpu = (unsigned)read_number("utilization", index, 0);
    rates->memory = 0;
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) {
    unsigned index;
    Device device;
    int status = device_of(handle, &index, &device);
    if (status != SUCCESS) return status;
    if (!is_there("power")) return NOT_SUPPORTED;
    *milliwatts = (unsigned)read_number("power", index, 0);
    return SUCCESS;
}

int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *millijoules) {
    unsigned index;
    Device device;
    int status = device_of(handle, &index, &device);
    if (status != SUCCESS) return status;
    if (!is_there("energy")) return NOT_SUPPORTED;
    *millijoules = read_number("energy", index, 0);
    return SUCCESS;
}

static int list_processes(void *handle, unsigned *count, Process *processes, int listed) {
    static Holder holders[MAX_HOLDERS];
    unsigned index, found = 0, room = *count;
    Device device;
    int status = device_of(handle, &index, &device);
    if (status != SUCCESS) return status;
    if (is_there("no_process_lists")) return NOT_SUPPORTED;
    if (!listed || is_there("hidden_processes")) { *count = 0; return SUCCESS; }
    int is_foreign = is_there("foreign_pids"), says_nothing = is_there("no_process_memory");
    for (unsigned at = 0, all = read_holders(holders); at < all; at++) {
        if (holders[at].index != index) continue;
        if (processes != NULL && found < room) {
            processes[found].pid = holders[at].pid + (is_foreign ? FOREIGN_OFFSET : 0);
            processes[found].bytes = says_nothing ? NOT_AVAILABLE : holders[at].bytes;
            processes[found].gpu_instance = holders[at].part;
            processes[found].compute_instance = NO_PART;
        }
        found++;
    }
    *count = found;
    return found > room || (found > 0 && processes == NULL) ? INSUFFICIENT_SIZE : SUCCESS;
}

/* A driver of before 2022 has only the second version. */
#define LIST(name, listed) \
    int name##_v3(void *handle, unsigned *count, Process *processes) { \
        return list_processes(handle, count, processes, listed); \
    } \
    int name##_v2(void *handle, unsigned *count, Process *processes) { \
        return list_processes(handle, count, processes, listed); \
    }
LIST(nvmlDeviceGetComputeRunningProcesses, 1)
LIST(nvmlDeviceGetGraphicsRunningProcesses, is_there("graphics"))
LIST(nvmlDeviceGetMPSComputeRunningProcesses, 0)

/* Lines "pid microseconds percent", of every device alike. */
int nvmlDeviceGetProcessUtilization(void *handle, Sample *samples, unsigned *count, unsigned long long since) {
    unsigned index, found = 0, room = *count;
    Device device;
    char line[MAX_LINE];
    int status = device_of(handle, &index, &device);
    if (status != SUCCESS) return status;
    for (unsigned at = 0; read_line("samples", at, line); at++) {
        Sample sample = {0};
        if (sscanf(line, "%u %llu %u", &sample.pid, &sample.time, &sample.sm) != 3 || sample.time <= since) continue;
        if (samples != NULL && found < room) samples[found] = sample;
        found++;
    }
    *count = found;
    if (found == 0) return NOT_FOUND;
    return samples == NULL || found > room ? INSUFFICIENT_SIZE : SUCCESS;
}
