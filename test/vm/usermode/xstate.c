/*
 * Stands between Debian 12's User Mode Linux and ptrace(2). That kernel sets the
 * floating-point and vector registers of its processes from 2,696 bytes, as much
 * as processors had when it was written (arch/x86/um/user-offsets.c,
 * HOST_FP_SIZE). Newer ones have more, AMX's tiles; the host refuses to set less
 * than all with EFAULT (arch/x86/kernel/fpu/regset.c, xstateregs_set), and the
 * guest's first process dies. Here what is missing is appended as zeros: the state
 * of tiles nobody uses, as a process must ask the kernel before it may
 * (arch_prctl(2), ARCH_REQ_XCOMP_PERM), and the guest's kernel doesn't know how.
 *
 * Loaded by LD_PRELOAD; see ../uml.sh.
 */
#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* set_vector_registers passes on what is given, as long as the host wants it. */
static long set_vector_registers(pid_t pid, struct iovec *given)
{
	static char whole[1 << 16]; /* beyond what is given, always zeros */
	static size_t size;         /* of the host's processors; the guest's kernel is one thread */
	struct iovec io = {whole, sizeof whole};

	if (size == 0) {
		if (syscall(SYS_ptrace, PTRACE_GETREGSET, pid, NT_X86_XSTATE, &io) < 0)
			return -1;
		size = io.iov_len;
		memset(whole, 0, size);
	}
	if (given->iov_len >= size)
		return syscall(SYS_ptrace, PTRACE_SETREGSET, pid, NT_X86_XSTATE, given);
	memcpy(whole, given->iov_base, given->iov_len);
	io.iov_len = size;
	return syscall(SYS_ptrace, PTRACE_SETREGSET, pid, NT_X86_XSTATE, &io);
}

/* ptrace is glibc's but for one request, and for PTRACE_PEEK* where it is as glibc's is. */
long ptrace(enum __ptrace_request request, ...)
{
	va_list arguments;
	pid_t pid;
	void *address, *data;
	long word, result;

	va_start(arguments, request);
	pid = va_arg(arguments, pid_t);
	address = va_arg(arguments, void *);
	data = va_arg(arguments, void *);
	va_end(arguments);

	switch (request) {
	case PTRACE_SETREGSET:
		if ((long)address == NT_X86_XSTATE)
			return set_vector_registers(pid, data);
		break;
	case PTRACE_PEEKTEXT:
	case PTRACE_PEEKDATA:
	case PTRACE_PEEKUSER: /* the kernel writes the word, glibc returns it */
		result = syscall(SYS_ptrace, request, pid, address, &word);
		if (result < 0)
			return result;
		errno = 0;
		return word;
	default:
		break;
	}
	return syscall(SYS_ptrace, request, pid, address, data);
}
